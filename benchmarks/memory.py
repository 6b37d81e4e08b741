"""Resident memory of every process of a server over a long run of small requests, all different.

What a process keeps on purpose has a size that is set: here the KV cache is small, so that it is
full soon. Then memory must stay where it is. Given is by how much each process grew over the last
third of the run; the whole course is among the details.
"""

from __future__ import annotations

import re
import time
import urllib.request
from pathlib import Path
from typing import Any

from benchmarks import servers
from benchmarks.load import Load, first_model, generator, tree
from benchmarks.media_flood import process_name
from benchmarks.record import Figure
from benchmarks.servers import Server

ENGINES = {  # flags, and seconds of the run
    "torch": (("--pattern", "E/P/D", "--kv-cache-bytes", str(16 << 20)), 360.0),
    "fake": (
        ("--pattern", "E/P/D", "--engine=fake", "--enable-multimodal", "--fake-kv-blocks=1024"),
        90.0,
    ),
}
LOAD = Load("chat", 16, max_tokens=2, prompt="Hello, how is order ########?")
POINTS = 30
GROWTH_MB = 5.0  # over a third of the run: what an allocator may still move about


def run(quick: bool) -> tuple[list[Figure], dict[str, Any]]:
    figures: list[Figure] = []
    found: dict[str, Any] = {}
    for engine, (flags, seconds) in ENGINES.items():
        with servers.triptych(*flags) as server:
            found[engine] = _course(server, seconds / (20 if quick else 1))
        figures += _figures(engine, found[engine])
    return figures, found


def _course(server: Server, seconds: float) -> list[dict[str, float]]:
    """Megabytes of each process, and requests answered so far, at equal intervals."""
    points = [_look(server)]
    with generator(server.port, LOAD, first_model(server.port)):
        for _ in range(POINTS):
            time.sleep(seconds / POINTS)
            points.append(_look(server))
    return points


def _look(server: Server) -> dict[str, float]:
    found: dict[str, float] = {"requests": _answered(server.port)}
    for pid in tree(server.pid):
        try:
            name = process_name(Path(f"/proc/{pid}/cmdline").read_text().split("\0"))
            pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
        except OSError:  # it has ended meanwhile
            continue
        found[name] = round(found.get(name, 0.0) + pages * 4096 / 1e6, 1)
    return found


def _answered(port: int) -> float:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=30) as answer:
        text = answer.read().decode()
    counts = re.findall(r'_requests_total\{route="/v1/chat/completions".*?\} (\S+)', text)
    return sum(map(float, counts))


def _figures(engine: str, points: list[dict[str, float]]) -> list[Figure]:
    first, then, last = points[0], points[-1 - POINTS // 3], points[-1]
    figures = []
    for name in sorted(first.keys() - {"requests", "supervisor"}):
        detail = (
            f"{first[name]:.0f} MB at the start, {then[name]:.0f} MB after "
            f"{then['requests']:.0f} requests, {last[name]:.0f} MB after {last['requests']:.0f}"
        )
        figures.append(
            Figure(
                f"{engine}, E/P/D, {name}: growth over the last third",
                last[name] - then[name],
                "MB",
                GROWTH_MB,
                detail=detail,
            )
        )
    return figures
