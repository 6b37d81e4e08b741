"""Text-only streams while a flood of large pictures comes in, beside the same streams without it.

Fake engine with the real decode pool. Streams and flood are told apart in nothing but what they
ask. Given are the 99th percentiles of time to first token and between tokens, as ratios; how late
any event loop was, and how much of that was its own work; and the most memory of every process,
for a flood and for one of twice the size.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks import flood, servers
from benchmarks.load import Load, first_model, generator, tree
from benchmarks.record import Figure
from benchmarks.servers import Server

PATTERNS = ("E/PD", "EPD")
FLAGS = ("--engine", "fake", "--enable-multimodal", "--fake-decode", "--fake-step-ms", "10")
TEXT = Load("stream", 16, max_tokens=32, prompt="Hello, how is order ########?")
DIFFERENT = 40  # pictures; as files they are as many as are sent
TIMES = 1.5
STALL_MS = 50.0


def run(quick: bool) -> tuple[list[Figure], dict[str, Any]]:
    count, rounds, quiet = (40, 1, 4.0) if quick else (200, 2, 20.0)
    figures: list[Figure] = []
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as name:
        flood.write(Path(name), min(count, DIFFERENT))
        for pattern in PATTERNS:
            with servers.triptych(*FLAGS, "--pattern", pattern) as server:
                _flooded(server, Path(name), 4)  # processes start, buffers grow
                turns = [
                    (_text(server, quiet), _flooded(server, Path(name), count))
                    for _ in range(rounds)
                ]
                double = _flooded(server, Path(name), 2 * count)
            found[pattern] = {"rounds": turns, "double": double}
            figures += _figures(pattern, count, turns, double)
    return figures, found


def _text(server: Server, seconds: float) -> dict[str, Any]:
    watch = Watch(server)
    with generator(server.port, TEXT, first_model(server.port)) as load:
        time.sleep(seconds)
    return {"text": load.found, **watch.end()}


def _flooded(server: Server, folder: Path, count: int) -> dict[str, Any]:
    """The same while the flood lasts."""
    model = first_model(server.port)
    words = [sys.executable, "-m", "benchmarks.flood", server.port, model, folder, count]
    watch = Watch(server)
    with generator(server.port, TEXT, model) as load:
        time.sleep(0.5)
        done = subprocess.run(
            [str(word) for word in words], cwd=servers.ROOT, stdout=subprocess.PIPE, check=True
        )
    return {"text": load.found, "flood": json.loads(done.stdout), **watch.end()}


class Watch:
    """Looks at the processes of a server in a thread until the end: memory, and lateness."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self._peak: dict[str, float] = {}
        self._lag: dict[str, dict[str, float]] = {}
        self._stalls = self._look_lag()
        self._lag.clear()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._look)
        self._thread.start()

    def end(self) -> dict[str, Any]:
        self._ended.set()
        self._thread.join()
        after = self._look_lag()
        stalls = {name: after[name] - self._stalls.get(name, 0) for name in after}
        return {"peak_mb": self._peak, "lag_ms": self._lag, "stalls": stalls}

    def _look(self) -> None:
        turn = 0
        while not self._ended.wait(0.2):
            turn += 1
            self._look_memory()
            if turn % 20 == 0:
                self._look_lag()

    def _look_memory(self) -> None:
        now: dict[str, float] = {}
        for pid in tree(self._server.pid):
            try:
                name = process_name(Path(f"/proc/{pid}/cmdline").read_text().split("\0"))
                pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
            except OSError:  # it has ended meanwhile
                continue
            now[name] = now.get(name, 0.0) + round(pages * 4096 / 1e6, 1)
        for name, size in now.items():
            self._peak[name] = max(size, self._peak.get(name, 0.0))

    def _look_lag(self) -> dict[str, float]:
        """The worst so far goes to its place; gives the stalls of each event loop until now."""
        with urllib.request.urlopen(
            f"http://127.0.0.1:{self._server.port}/metrics", timeout=30
        ) as answer:
            text = answer.read().decode()
        stalls: dict[str, float] = {}
        for found in re.finditer(
            r"^triptych_(?:event|worker)_loop_(lag|work|stalls)"
            r'(?:_seconds|_total)?(?:\{.*?worker="(.*?)".*?\})? (\S+)$',
            text,
            re.MULTILINE,
        ):
            what, name, value = found[1], found[2] or "frontend", float(found[3])
            if what == "stalls":
                stalls[name] = value
            else:
                seen = self._lag.setdefault(name, {})
                seen[what] = max(round(1e3 * value, 1), seen.get(what, 0.0))
        return stalls


def process_name(words: list[str]) -> str:
    if "triptych.media.sandbox" in words:
        return "decoding"
    if "triptych.sources.fetch_sandbox" in words:
        return "fetching"
    if "frontend" in words:
        return "frontend"
    return f"worker {words[words.index('--role') + 1]}" if "--role" in words else "supervisor"


def _figures(
    pattern: str, count: int, turns: list[tuple[dict[str, Any], dict[str, Any]]], double: Any
) -> list[Figure]:
    figures = []
    for what, name in (("ttft_ms", "first token"), ("itl_ms", "between tokens")):
        calm, wild = (median(turn[i]["text"][what]["p99"] for turn in turns) for i in (0, 1))
        figures.append(
            Figure(
                f"{pattern}, text p99, {name}, {count} pictures",
                wild / calm,
                "x",
                TIMES,
                detail=f"{wild:.1f} ms beside {calm:.1f} ms",
            )
        )
    wild = [turn[1] for turn in turns]
    work, where = max(
        (lag["work"], process) for turn in wild for process, lag in turn["lag_ms"].items()
    )
    name = f"{pattern}, longest work of an event loop in one go"
    figures.append(Figure(name, work, "ms", STALL_MS, detail=f"in the {where}"))
    stalls = sum(sum(turn["stalls"].values()) for turn in wild)
    late, where = max(
        (lag["lag"], process) for turn in wild for process, lag in turn["lag_ms"].items()
    )
    name = f"{pattern}, times that an event loop was over {STALL_MS:g} ms late"
    detail = f"latest by {late:.0f} ms, in the {where}"
    figures.append(Figure(name, stalls, "", 0, detail=detail))
    answered = min(turn["flood"]["statuses"].get("200", 0) for turn in wild)
    name = f"{pattern}, pictures answered with 200, of {count}"
    figures.append(Figure(name, answered, "", count, True))
    one = median(sum(turn["peak_mb"].values()) for turn in wild)
    two = sum(double["peak_mb"].values())
    each = ", ".join(f"{name} {size:.0f}" for name, size in double["peak_mb"].items())
    figures.append(
        Figure(
            f"{pattern}, memory for {2 * count} pictures beside {count}",
            two / one,
            "x",
            1.1,
            detail=f"{two:.0f} MB beside {one:.0f} MB: {each}",
        )
    )
    return figures
