"""What the embedding cache is worth when pictures come again: with it and without, in turns.

A thousand requests draw from a pool of 200 pictures by Zipf's law, 16 at once, each with a text of
its own and four tokens to make; E/PD, torch engine on a CPU, a tiny model. The prefix cache is off
on both sides, so that what is saved is decoding and encoding alone. Off means that the caches of
embeddings and of decoded media are both off.
"""

from __future__ import annotations

import functools
import http.client
import json
import random
import threading
import time
import urllib.request
from statistics import median
from typing import Any

from benchmarks import pictures, servers
from benchmarks.load import cpu_seconds, first_model
from benchmarks.record import Figure
from benchmarks.servers import Server

POOL, ASKS, AT_ONCE, TOKENS = 200, 1000, 16, 4
SIDES = (336, 672)  # pixels, least and most
FLAGS = ("--engine", "torch", "--device", "cpu", "--pattern", "E/PD", "--enable-multimodal",
         "--cpu-threads", "1", "--no-torch-prefix-cache")  # fmt: skip
SIDES_OF = {
    "cache on": (),
    "cache off": ("--cache-embeddings=0", "--cache-decoded=0"),
}


def run(quick: bool) -> tuple[list[Figure], dict[str, Any]]:
    from tools import tiny

    model = str(tiny.ensure_checkpoint("qwen2_5_vl"))
    asks, rounds = (100, 1) if quick else (ASKS, 3)
    found: dict[str, list[dict[str, float]]] = {name: [] for name in SIDES_OF}
    for turn in range(rounds):
        for name, flags in SIDES_OF.items():  # a new server: its cache begins empty
            with servers.triptych(model, *FLAGS, *flags) as server:
                found[name].append(_measure(server, drawn(turn, asks)))
    return _figures(found), found


def drawn(seed: int, asks: int) -> list[int]:
    """Numbers of pictures: the n-th most popular is drawn 1/n as often as the first."""
    weights = [1 / rank for rank in range(1, POOL + 1)]
    return random.Random(seed).choices(range(POOL), weights, k=asks)


@functools.cache
def _url(number: int) -> str:
    draw = random.Random(number)
    width, height = (draw.randint(*SIDES) for _ in range(2))
    scene = pictures.scene(9, 1000, 1000)
    left, top = draw.randrange(1000 - width), draw.randrange(1000 - height)
    return pictures.data_url(pictures.jpeg(scene[top : top + height, left : left + width]))


def _measure(server: Server, numbers: list[int]) -> dict[str, float]:
    model = first_model(server.port)
    left = list(enumerate(numbers))[::-1]
    for number in set(numbers):
        _url(number)
    _ask(server.port, model, 0, _plain())  # what is made on first use is made
    errors: list[Exception] = []

    def client() -> None:
        while left:
            try:
                at, number = left.pop()
                _ask(server.port, model, at, _url(number))
            except IndexError:
                return
            except (OSError, RuntimeError) as error:
                errors.append(error)
                return

    before, start = cpu_seconds(server.pid), time.perf_counter()
    clients = [threading.Thread(target=client) for _ in range(AT_ONCE)]
    for one in clients:
        one.start()
    for one in clients:
        one.join()
    if errors:
        raise errors[0]
    seconds, spent = time.perf_counter() - start, cpu_seconds(server.pid) - before
    counted = _counters(server)
    known = counted.get("embedding_cache_hits", 0.0) + counted.get("encodes_joined", 0.0)
    return {
        "requests_per_s": round(len(numbers) / seconds, 2),
        "cpu_ms_per_request": round(1e3 * spent / len(numbers), 2),
        "known": known / len(numbers),
        "encoded": counted.get("encoded_items", 0.0),
        "different": float(len(set(numbers))),
    }


@functools.cache
def _plain() -> str:
    return pictures.data_url(pictures.photo(8, 100, 100))


def _ask(port: int, model: str, at: int, url: str) -> None:
    content = [
        {"type": "text", "text": f"{at}: what is to be seen?"},
        {"type": "image_url", "image_url": {"url": url}},
    ]
    body = {
        "model": model,
        "messages": [{"role": "user", "content": content}],
        "max_tokens": TOKENS,
        "temperature": 0,
        "ignore_eos": True,
    }
    client = http.client.HTTPConnection("127.0.0.1", port, timeout=120)
    client.request(
        "POST", "/v1/chat/completions", json.dumps(body), {"Content-Type": "application/json"}
    )
    answer = client.getresponse()
    text = answer.read()
    client.close()
    if answer.status != 200:
        raise RuntimeError(f"{answer.status}: {text[:400]!r}")


def _counters(server: Server) -> dict[str, float]:
    with urllib.request.urlopen(f"http://127.0.0.1:{server.port}/cluster", timeout=10) as answer:
        workers = json.load(answer)["workers"]
    [encoder] = [worker for worker in workers if worker["role"] == "E"]
    counters: dict[str, float] = encoder["counters"]
    return counters


def _figures(found: dict[str, list[dict[str, float]]]) -> list[Figure]:
    middle = {
        name: {what: median(turn[what] for turn in turns) for what in turns[0]}
        for name, turns in found.items()
    }
    on, off = middle["cache on"], middle["cache off"]
    known = 100 * on["known"]
    detail = f"{on['encoded']:.0f} encoded for {on['different']:.0f} different pictures"
    return [
        Figure("requests that needed no encoding", known, "%", detail=detail),
        Figure(
            "requests/s, on over off",
            on["requests_per_s"] / off["requests_per_s"],
            "x",
            1.0,
            True,
            f"{on['requests_per_s']:.1f} beside {off['requests_per_s']:.1f}",
        ),
        Figure(
            "CPU per request, off over on",
            off["cpu_ms_per_request"] / on["cpu_ms_per_request"],
            "x",
            None,
            True,
            f"{on['cpu_ms_per_request']:.1f} ms beside {off['cpu_ms_per_request']:.1f} ms",
        ),
    ]
