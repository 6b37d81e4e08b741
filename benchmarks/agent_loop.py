"""Agents that look at screenshots and call tools, all at once, in E/P/D with ``--routing kv``.

50 sessions of 20 turns. Each turn sends the whole conversation; the answer must be a call of one of
the tools, whose arguments fit its schema; its result is a text and the next screenshot. A prompt
has the last five screenshots, and a note in place of each earlier one: with every turn the prompt
changes at the earliest of the five, and what follows it cannot come from a cache. The best possible
(best_cached.py) is computed for these prompts.

The fake engine says scripted calls (``tool_choice: auto``, so the parser finds them); the torch
engine computes with random weights, and a grammar makes its answers calls (``required``).
"""

from __future__ import annotations

import base64
import http.client
import io
import json
import random
import tempfile
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks import servers
from benchmarks.best_cached import best_cached
from benchmarks.load import first_model
from benchmarks.record import Figure

SESSIONS, TURNS, WINDOW = 50, 20, 5
SHARE = 0.95  # of the best possible, at least
SCREEN = (224, 140)  # pixels
IDLE_SECONDS = 30.0
HELD = ("tickets", "segments", "queued", "running")  # by a worker, for requests
FLAGS = ("--pattern", "E/P*2/D*2", "--enable-multimodal", "--routing", "kv",
         "--chat-template", str(Path(__file__).parent / "agent_loop.jinja"))  # fmt: skip
ENGINES = {
    "fake": ("--engine", "fake", "--fake-prefill-us-per-token", "50", "--fake-step-ms", "2",
             "--fake-kv-blocks", "16384"),
    "torch": ("--engine", "torch", "--device", "cpu", "--cpu-threads", "1",
              "--torch-kv-blocks", "16384"),
}  # fmt: skip
SYSTEM = (
    "You operate a computer for the user. Look at the screenshot, choose one action, and call the "
    "tool for it. Earlier screenshots are left out. Never guess a password."
)
TASK = "Session {session}: book a table for two, step by step."
RESULT = "Done: step {turn} of session {session}."
LEFT_OUT = "(An earlier screenshot.)"


def _tool(name: str, description: str, **properties: Any) -> dict[str, Any]:
    parameters = {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }
    function = {"name": name, "description": description, "parameters": parameters}
    return {"type": "function", "function": function}


TOOLS = [
    _tool("click", "Click at a point of the screen.",
          x={"type": "integer", "minimum": 0, "maximum": 1279},
          y={"type": "integer", "minimum": 0, "maximum": 799}),
    _tool("type", "Type a text.", text={"type": "string", "maxLength": 12}),
    _tool("scroll", "Scroll the page.",
          direction={"enum": ["up", "down"]},
          pages={"type": "integer", "minimum": 1, "maximum": 9}),
]  # fmt: skip
SCHEMAS = {tool["function"]["name"]: tool["function"]["parameters"] for tool in TOOLS}
SCRIPTED = (
    ("click", {"x": 640, "y": 400}),
    ("type", {"text": "two"}),
    ("scroll", {"direction": "down", "pages": 1}),
)


class InvalidCall(Exception):
    """An answer that is no call of one of the tools."""


@dataclass(frozen=True)
class Turn:
    """One answered request."""

    begun: float
    ended: float
    first: float  # seconds to the first token
    prompt: tuple[int, ...]  # expanded
    made: tuple[int, ...]
    pictures: tuple[int, ...]
    cached: int


@dataclass
class Session:
    """One agent on its way."""

    number: int
    messages: list[dict[str, Any]]
    screens: list[int] = field(default_factory=list)  # numbers of the screenshots so far


def run(quick: bool) -> tuple[list[Figure], dict[str, Any]]:
    sessions, turns = (5, 6) if quick else (SESSIONS, TURNS)
    figures: list[Figure] = []
    details: dict[str, Any] = {}
    for engine in ENGINES:
        with serving_agents(engine) as port:
            asked = run_sessions(port, sessions, turns, choice_of(engine))
            held = await_idle(port)
        details[engine] = judged(asked) | held
        figures += _figures(engine, details[engine], sessions * turns)
    return figures, details


def choice_of(engine: str) -> str:
    return "auto" if engine == "fake" else "required"


@contextmanager
def serving_agents(engine: str) -> Iterator[int]:
    """A server for the sessions; gives its port."""
    with (
        tempfile.TemporaryDirectory() as folder,
        servers.triptych(*flags_of(engine, Path(folder))) as server,
    ):
        yield server.port


def flags_of(engine: str, folder: Path) -> tuple[str, ...]:
    """``folder``: for the script of the fake engine's replies."""
    if engine == "fake":
        script = folder / "replies.jsonl"
        script.write_text("\n".join(json.dumps(line) for line in replies()))
        return (*FLAGS, *ENGINES[engine], "--fake-replies", str(script))
    from tools import tiny  # imports torch

    return (str(tiny.ensure_checkpoint("qwen2_5_vl")), *FLAGS, *ENGINES[engine])


def replies() -> Iterator[dict[str, str]]:
    """A call for each turn. A prompt has the results of all turns so far, so the last come first:
    the engine takes the first line that fits."""
    for turn in range(TURNS, 0, -1):
        name, arguments = SCRIPTED[turn % len(SCRIPTED)]
        call = json.dumps({"name": name, "arguments": arguments})
        yield {
            "prompt": f"Done: step {turn - 1} of" if turn > 1 else "",
            "reply": f"<tool_call>{call}</tool_call>",
        }


def run_sessions(port: int, sessions: int, turns: int, choice: str) -> list[Turn]:
    """All sessions at once, each turn after its last; raises the first error."""
    model, asked, errors = first_model(port), list[Turn](), list[Exception]()

    def agent(number: int) -> None:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=300)
        session = Session(number, [{"role": "system", "content": SYSTEM}])
        try:
            for turn in range(turns):
                if errors:
                    break
                asked.append(_take_turn(connection, model, session, turn, choice))
        except (OSError, RuntimeError, InvalidCall, http.client.HTTPException) as error:
            errors.append(error)
        finally:
            connection.close()

    agents = [threading.Thread(target=agent, args=(number,)) for number in range(sessions)]
    for one in agents:
        one.start()
    for one in agents:
        one.join()
    if errors:
        raise errors[0]
    return asked


def _take_turn(
    connection: http.client.HTTPConnection, model: str, session: Session, turn: int, choice: str
) -> Turn:
    _look(session, turn)
    body = {
        "model": model,
        "messages": session.messages,
        "tools": TOOLS,
        "tool_choice": choice,
        "parallel_tool_calls": False,
        "max_tokens": 200,
        "seed": 1000 * session.number + turn,
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
    message: dict[str, Any] = {"role": "assistant", "content": "", "tool_calls": []}
    prompt, made, usage, finish = tuple[int, ...](), list[int](), dict[str, Any](), ""
    while line := answer.readline():
        if not line.startswith(b"data: {"):
            continue
        chunk = json.loads(line[6:])
        if "error" in chunk:
            raise RuntimeError(f"in a stream: {chunk['error']}")
        prompt = tuple(chunk.get("prompt_token_ids") or prompt)
        usage = chunk.get("usage") or usage
        for one in chunk["choices"]:
            made += one.get("token_ids") or ()
            finish = one["finish_reason"] or finish
            first = first or time.perf_counter() - begun
            _add(message, one["delta"])
    ended = time.perf_counter()
    if finish != "tool_calls":
        raise InvalidCall(f"{finish}: {message}")
    check_call(message)
    session.messages.append(message)
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    screens = tuple(session.screens[-WINDOW:])
    return Turn(begun, ended, first, prompt, tuple(made), screens, cached)


def _look(session: Session, turn: int) -> None:
    """Add the message with the next screenshot, and leave out the one that is now too old."""
    number = 1000 * session.number + turn
    session.screens.append(number)
    picture = {"type": "image_url", "image_url": {"url": _screen(number)}}
    if turn:
        call = session.messages[-1]["tool_calls"][0]["id"]
        text = RESULT.format(turn=turn, session=session.number)
        message = {"role": "tool", "tool_call_id": call}
    else:
        text = TASK.format(session=session.number)
        message = {"role": "user"}
    session.messages.append(message | {"content": [{"type": "text", "text": text}, picture]})
    seen = [one for one in session.messages if isinstance(one["content"], list)]
    for one in seen[:-WINDOW]:
        one["content"][1] = {"type": "text", "text": LEFT_OUT}


def _add(message: dict[str, Any], delta: dict[str, Any]) -> None:
    message["content"] += delta.get("content") or ""
    for piece in delta.get("tool_calls") or ():
        if piece.get("id"):
            function = {"name": piece["function"]["name"], "arguments": ""}
            message["tool_calls"].append(
                {"id": piece["id"], "type": "function", "function": function}
            )
        call = message["tool_calls"][piece["index"]]
        call["function"]["arguments"] += piece["function"].get("arguments") or ""


def check_call(message: dict[str, Any]) -> None:
    """Raise InvalidCall unless the message is one call that fits the schema of its tool."""
    import jsonschema

    calls = [call["function"] for call in message["tool_calls"]]
    if message["content"] or len(calls) != 1 or calls[0]["name"] not in SCHEMAS:
        raise InvalidCall(str(message))
    try:
        jsonschema.validate(json.loads(calls[0]["arguments"]), SCHEMAS[calls[0]["name"]])
    except (ValueError, jsonschema.ValidationError) as error:
        raise InvalidCall(f"{calls[0]}: {error}") from None


def _screen(number: int) -> str:
    """A desktop with some windows, as a PNG in a data URL."""
    from PIL import Image

    draw = random.Random(number)
    image = Image.new("RGB", SCREEN, (40, 60, 90))
    for _ in range(4):
        left, top = draw.randrange(SCREEN[0] - 60), draw.randrange(SCREEN[1] - 40)
        colour = draw.randrange(256), draw.randrange(256), draw.randrange(256)
        image.paste(colour, (left, top, left + draw.randrange(20, 60), top + draw.randrange(9, 40)))
    file = io.BytesIO()
    image.save(file, "PNG")
    return "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()


def await_idle(port: int) -> dict[str, float]:
    """What workers still hold after the last answer; they get some seconds to give it back."""
    deadline = time.monotonic() + IDLE_SECONDS
    while any((held := _held(port)).values()) and time.monotonic() < deadline:
        time.sleep(0.1)
    return held


def _held(port: int) -> dict[str, float]:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/cluster", timeout=30) as got:
        workers = json.load(got)["workers"]
    held = {f"held_{what}": sum(worker[what] for worker in workers) for what in HELD}
    blocks = sum(worker["kv_blocks_total"] - worker["kv_blocks_free"] for worker in workers)
    return held | {"held_kv_blocks": blocks}


def judged(asked: list[Turn]) -> dict[str, float]:
    firsts = sorted(one.first for one in asked)
    seconds = max(one.ended for one in asked) - min(one.begun for one in asked)
    tokens = sum(len(one.prompt) for one in asked)
    cached, best = sum(one.cached for one in asked), best_cached(asked)
    return {
        "requests": len(asked),
        "prompt_tokens_mean": tokens / len(asked),
        "cached_share": cached / tokens,
        "best_share": best / tokens,
        "of_best": cached / best,
        "ttft_p50_ms": 1e3 * firsts[len(firsts) // 2],
        "ttft_p99_ms": 1e3 * firsts[len(firsts) * 99 // 100],
        "requests_per_s": len(asked) / seconds,
    }


def _figures(engine: str, found: dict[str, float], wanted: int) -> list[Figure]:
    held = sum(value for name, value in found.items() if name.startswith("held_"))
    return [
        Figure(f"{engine}: turns with a valid call", found["requests"], "", wanted, True,
               f"prompts of {found['prompt_tokens_mean']:.0f} tokens on average"),
        Figure(f"{engine}: cached tokens, of the best possible", found["of_best"], "", SHARE, True,
               f"{found['cached_share']:.3f} of all, best {found['best_share']:.3f}"),
        Figure(f"{engine}: held after the last turn", held, "", 0,
               detail="tickets, segments, KV blocks, requests"),
        Figure(f"{engine}: TTFT p50", found["ttft_p50_ms"], "ms"),
        Figure(f"{engine}: TTFT p99", found["ttft_p99_ms"], "ms"),
        Figure(f"{engine}: turns/s", found["requests_per_s"], ""),
    ]  # fmt: skip
