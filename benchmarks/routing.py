"""What it is worth to send requests where their KV cache is: every routing over the same talks.

Four workers that do everything (EPD*4); 200 conversations of 8 turns about 50 pictures, 16 of them
open at a time, in an order that mixes them: between two turns of one there are many of others. A
worker's KV cache has room for its share of them and not for all. The fake engine takes a set time
for each token that it must prefill; torch computes with the checkpoint that ships. All begin with
empty caches.

The best possible is computed from the tokens themselves (best_cached.py).
"""

from __future__ import annotations

import http.client
import json
import random
import threading
import time
from dataclasses import dataclass, field
from typing import Any

from benchmarks import pictures, servers
from benchmarks.best_cached import best_cached
from benchmarks.load import first_model
from benchmarks.record import Figure
from benchmarks.servers import Server

TALKS, TURNS, PICTURES, AT_ONCE, TOKENS = 200, 8, 50, 16, 16
ROUTINGS = ("kv", "least-loaded", "round-robin", "random")
SHARE = 0.9  # of the best possible, at least
ENGINES = {
    "fake": ("--engine", "fake", "--fake-prefill-us-per-token", "100", "--fake-step-ms", "2",
             "--fake-kv-blocks", "4096"),
    "torch": ("--engine", "torch", "--device", "cpu", "--cpu-threads", "1",
              "--torch-kv-blocks", "4096"),
}  # fmt: skip
FLAGS = ("--pattern", "EPD*4", "--enable-multimodal")
WORDS = ("what", "who", "where", "colour", "shape", "light", "left", "near", "above", "old", "new")


@dataclass
class Talk:
    """One conversation on its way."""

    number: int
    picture: int
    messages: list[dict[str, Any]] = field(default_factory=list)


@dataclass(frozen=True)
class Asked:
    """One answered request."""

    pictures: tuple[int, ...]
    begun: float
    first: float  # seconds to the first token
    ended: float
    prompt: tuple[int, ...]  # expanded
    made: tuple[int, ...]
    cached: int


def run(quick: bool) -> tuple[list[Figure], dict[str, Any]]:
    talks, turns = (24, 4) if quick else (TALKS, TURNS)
    figures: list[Figure] = []
    details: dict[str, Any] = {}
    for engine, flags in ENGINES.items():
        found = {}
        for routing in ROUTINGS:
            with servers.triptych(*FLAGS, *flags, "--routing", routing) as server:
                found[routing] = _judged(_measure(server, talks, turns))
        details[engine] = found
        figures += _figures(engine, found)
    return figures, details


def _measure(server: Server, talks: int, turns: int) -> list[Asked]:
    draw = random.Random(4)
    waiting = [Talk(n, draw.randrange(PICTURES)) for n in range(talks)] * turns
    draw.shuffle(waiting)
    model, asked, errors = first_model(server.port), list[Asked](), list[Exception]()
    turn_of = [threading.Lock() for _ in range(talks)]  # a talk waits for its own last answer
    for number in range(PICTURES):
        _picture(number)

    def client() -> None:
        connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=300)
        while waiting and not errors:
            try:
                talk = waiting.pop()
            except IndexError:
                break
            try:
                with turn_of[talk.number]:
                    asked.append(_ask(connection, model, talk))
            except (OSError, RuntimeError, http.client.HTTPException) as error:
                errors.append(error)
        connection.close()

    clients = [threading.Thread(target=client) for _ in range(AT_ONCE)]
    for one in clients:
        one.start()
    for one in clients:
        one.join()
    if errors:
        raise errors[0]
    return asked


def _ask(connection: http.client.HTTPConnection, model: str, talk: Talk) -> Asked:
    turn = len(talk.messages) // 2
    draw = random.Random(1000 * talk.number + turn)
    words = " ".join(draw.choice(WORDS) for _ in range(30))
    content: list[dict[str, Any]] = [{"type": "text", "text": f"{talk.number}.{turn} {words}?"}]
    if not turn:
        url = {"url": _picture(talk.picture)}
        content.insert(0, {"type": "image_url", "image_url": url})
    talk.messages.append({"role": "user", "content": content})
    body = {
        "model": model,
        "messages": talk.messages,
        "max_tokens": TOKENS,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
        "return_token_ids": True,
    }
    begun, first = time.perf_counter(), 0.0
    connection.request(
        "POST", "/v1/chat/completions", json.dumps(body), {"Content-Type": "application/json"}
    )
    answer = connection.getresponse()
    if answer.status != 200:
        raise RuntimeError(f"{answer.status}: {answer.read()[:400]!r}")
    said, prompt, made, usage = "", tuple[int, ...](), list[int](), dict[str, Any]()
    while line := answer.readline():
        if not line.startswith(b"data: {"):
            continue
        chunk = json.loads(line[6:])
        prompt = tuple(chunk.get("prompt_token_ids") or prompt)
        usage = chunk.get("usage") or usage
        for choice in chunk["choices"]:
            made += choice.get("token_ids") or ()
            said += choice["delta"].get("content") or ""
            first = first or (time.perf_counter() - begun if made else 0.0)
    ended = time.perf_counter()
    talk.messages.append({"role": "assistant", "content": said})
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    return Asked((talk.picture,), begun, first, ended, prompt, tuple(made), cached)


def _picture(number: int) -> str:
    return pictures.data_url(pictures.photo(number, 224, 224))


def _judged(asked: list[Asked]) -> dict[str, float]:
    firsts = sorted(one.first for one in asked)
    seconds = max(one.ended for one in asked) - min(one.begun for one in asked)
    tokens = sum(len(one.prompt) for one in asked)
    cached, best = sum(one.cached for one in asked), best_cached(asked)
    return {
        "requests": len(asked),
        "cached_share": cached / tokens,
        "best_share": best / tokens,
        "of_best": cached / best,
        "ttft_p50_ms": 1e3 * firsts[len(firsts) // 2],
        "ttft_p99_ms": 1e3 * firsts[len(firsts) * 99 // 100],
        "requests_per_s": len(asked) / seconds,
        "tokens_per_s": (tokens + sum(len(one.made) for one in asked)) / seconds,
    }


def _figures(engine: str, found: dict[str, dict[str, float]]) -> list[Figure]:
    kv, others = found["kv"], [name for name in ROUTINGS if name != "kv"]

    def beside(what: str, places: int = 1) -> str:
        return ", ".join(f"{name} {found[name][what]:.{places}f}" for name in others)

    return [
        Figure(f"{engine}: cached tokens, of the best possible", kv["of_best"], "", SHARE, True,
               f"best {kv['best_share']:.2f} of all; " + beside("of_best", 2)),
        Figure(f"{engine}: cached tokens, of all", kv["cached_share"], "",
               detail=beside("cached_share", 2)),
        Figure(f"{engine}: TTFT p50", kv["ttft_p50_ms"], "ms", detail=beside("ttft_p50_ms")),
        Figure(f"{engine}: TTFT p99", kv["ttft_p99_ms"], "ms", detail=beside("ttft_p99_ms")),
        Figure(f"{engine}: requests/s", kv["requests_per_s"], "", detail=beside("requests_per_s")),
    ]  # fmt: skip
