"""The torch engine beside vLLM, each behind its own server, on a CPU, with pictures and without.

The same checkpoint and prompts, 16 at once, one thread for the language model on both sides (the
torch engine encodes pictures in a second one). Both servers run, and are asked in turns. vLLM runs
as Triptych would start it: eager, float32.
"""

from __future__ import annotations

import json
import random
import time
from collections.abc import Iterator
from statistics import median
from typing import Any

from benchmarks import checkpoints, pictures, servers
from benchmarks.kept import Kept
from benchmarks.load import cpu_seconds, first_model
from benchmarks.record import Figure
from benchmarks.streams import ask_all
from benchmarks.vllm_overhead import SPIN_SECONDS, triptych, vllm

AT_ONCE = 16
WORDS = 60  # of a prompt: about twice as many tokens
TOKENS = 64
SIDE = 336  # pixels: 144 tokens
ROUNDS = {"tiny": 6, "middle": 4}
BATCHES = {"tiny": 4, "middle": 1}  # of AT_ONCE requests in a round
SPOKEN = ("the", "a", "one", "two", "blue", "red", "fox", "star", "heart", "left", "above", "seven")


def run(quick: bool) -> tuple[list[Figure], dict[str, Any]]:
    kept = Kept("engine_compare-quick" if quick else "engine_compare")
    for name in ("tiny",) if quick else ROUNDS:
        kept.part(name, lambda name=name: _measure(name, 2 if quick else ROUNDS[name]))
    kept.forget()
    figures = [figure for name, found in kept.found.items() for figure in _figures(name, found)]
    return figures, {"versions": servers.vllm_version(), "when": kept.when, **kept.found}


def _measure(name: str, rounds: int) -> dict[str, Any]:
    folder = str(checkpoints.ensure(name))
    found: dict[str, Any] = {"start_seconds": {}, "memory_bytes": {}}
    with triptych(folder, "torch") as ours, vllm(folder) as theirs:
        sides = {"torch": ours, "vllm": theirs}
        for kind in ("text", "image"):
            found[kind] = {side: [] for side in sides}
            for turn in range(rounds + 1):
                for side in sides if turn % 2 else reversed(sides):
                    time.sleep(SPIN_SECONDS)
                    result = _round(sides[side], kind, turn, BATCHES[name])
                    if turn:  # the first one warms up
                        found[kind][side].append(result)
        for side, server in sides.items():
            found["start_seconds"][side] = round(server.seconds, 2)
            found["memory_bytes"][side] = servers.memory(server.pid)
    return found


def _round(server: servers.Server, kind: str, turn: int, batches: int) -> dict[str, float]:
    bodies = list(_bodies(first_model(server.port), kind, turn, batches * AT_ONCE))
    before, start = cpu_seconds(server.pid), time.perf_counter()
    streams = ask_all(server.port, bodies, AT_ONCE)
    seconds = time.perf_counter() - start
    output = sum(stream.output for stream in streams)
    return {
        "tokens_per_s": round(output / seconds, 2),
        "ttft_ms": round(1e3 * median(stream.first for stream in streams), 2),
        "cpu_ms_per_token": round(1e3 * (cpu_seconds(server.pid) - before) / output, 3),
        "prompt_tokens": sum(stream.prompt for stream in streams),
        "output_tokens": output,
    }


def _bodies(model: str, kind: str, turn: int, count: int) -> Iterator[bytes]:
    """Every text and every picture is new to the server."""
    draw = random.Random(f"{kind} {turn}")
    for number in range(count):
        text = f"{turn}.{number}: " + " ".join(draw.choices(SPOKEN, k=WORDS))
        content: list[dict[str, Any]] = [{"type": "text", "text": text}]
        if kind == "image":
            scene = pictures.scene(draw.randrange(1 << 30), SIDE, SIDE)
            url = pictures.data_url(pictures.jpeg(scene))
            content.append({"type": "image_url", "image_url": {"url": url}})
        body = {
            "model": model,
            "messages": [{"role": "user", "content": content}],
            "max_tokens": TOKENS,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        yield json.dumps(body).encode()


def _figures(name: str, found: dict[str, Any]) -> list[Figure]:
    figures = []
    for kind in ("text", "image"):
        for key, what, unit in (
            ("tokens_per_s", "tokens/s", ""),
            ("ttft_ms", "TTFT", " ms"),
            ("cpu_ms_per_token", "CPU for a token, its prompt included", " ms"),
        ):
            ours, theirs = (
                median(one[key] for one in found[kind][side]) for side in ("torch", "vllm")
            )
            figures.append(_beside(f"{name}, {kind}: {what}", ours, theirs, unit))
    start, memory = found["start_seconds"], found["memory_bytes"]
    figures.append(_beside(f"{name}: start-up", start["torch"], start["vllm"], " s"))
    mib = {side: count / 2**20 for side, count in memory.items()}
    figures.append(_beside(f"{name}: memory, all processes", mib["torch"], mib["vllm"], " MiB"))
    return figures


def _beside(what: str, ours: float, theirs: float, unit: str) -> Figure:
    detail = f"{ours:.4g}{unit} beside {theirs:.4g}{unit}"
    return Figure(f"{what}, torch over vLLM", ours / theirs, "x", detail=detail)
