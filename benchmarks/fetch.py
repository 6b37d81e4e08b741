"""Media by URL: what a fetch costs, and what hostile servers cost others.

A file from a server on this machine, through the frontend's fetcher with its process, beside an
aiohttp client on the same event loop, in turns. Then text-only streams of a real server while
eight hostile URLs are asked for at a time, again and again, beside the same streams without them.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

import aiohttp

from benchmarks import servers
from benchmarks.fetch_origin import ENDLESS, SIZES
from benchmarks.load import cpu_seconds, first_model, generator, tree
from benchmarks.media_flood import STALL_MS, TEXT, TIMES, Watch
from benchmarks.record import Figure
from benchmarks.servers import Server
from triptych.config import CacheSettings, Config
from triptych.sources.loader import MediaLoader
from triptych.sources.uploads import UploadStore

HOSTILE_AT_ONCE = 8
FLAGS = ("--engine", "fake", "--enable-multimodal", "--allow-private-media")
FLAGS += ("--pattern", "EPD", "--limits-fetch-seconds", "3", "--fake-step-ms", "10")


def run(quick: bool) -> tuple[list[Figure], dict[str, Any]]:
    with _origin() as port:
        costs = asyncio.run(_costs(port, 20 if quick else 300))
        hostile = _hostile(port, 3.0 if quick else 15.0)
    return [*_cost_figures(costs), *_hostile_figures(hostile)], {"costs": costs, "hostile": hostile}


@contextmanager
def _origin() -> Iterator[int]:
    words = ["nice", "-n", "10", sys.executable, "-m", "benchmarks.fetch_origin"]  # else elsewhere
    with subprocess.Popen(
        words, cwd=servers.ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        yield int(process.stdout.readline())
        process.stdin.close()


async def _costs(port: int, count: int) -> dict[str, Any]:
    config = Config(allow_private_media=True, cache=CacheSettings(fetched=0))
    sources = MediaLoader(config, UploadStore(0, 1.0))
    sources.start()
    found: dict[str, Any] = {}
    async with aiohttp.ClientSession() as session:

        async def ours(url: str) -> int:
            with sources.reserve("a\n") as reservation:
                return len(await sources.load(url, "image", "file", "a\n", reservation))

        async def plain(url: str) -> int:
            async with session.get(url) as answer:
                return len(await answer.read())

        for path in SIZES:
            url, turns = f"http://127.0.0.1:{port}{path}", []
            await ours(url)  # also for the process to be there
            for _ in range(6):
                turns.append({
                    "ours": await _turn(ours, url, count // 5),
                    "aiohttp": await _turn(plain, url, count // 5),
                })  # fmt: skip
            found[path] = turns[1:]  # the first one warms up
    await sources.close()
    return found


async def _turn(fetch: Callable[[str], Awaitable[int]], url: str, count: int) -> dict[str, float]:
    """Of one fetch, in milliseconds: the median time, and CPU of this process and the fetching."""
    fetching = next(pid for pid in tree(os.getpid()) if "fetch_sandbox" in _command(pid))
    taken = []
    own, theirs = time.process_time(), cpu_seconds(fetching)
    for _ in range(count):
        start = time.perf_counter()
        await fetch(url)
        taken.append(1e3 * (time.perf_counter() - start))
    own, theirs = time.process_time() - own, cpu_seconds(fetching) - theirs
    return {
        "ms": round(median(taken), 3),
        "frontend_cpu_ms": round(1e3 * own / count, 3),
        "fetching_cpu_ms": round(1e3 * theirs / count, 3),
    }


def _command(pid: int) -> str:
    return Path(f"/proc/{pid}/cmdline").read_text()


def _cost_figures(costs: dict[str, Any]) -> list[Figure]:
    figures = []
    for path, turns in costs.items():
        name = path.strip("/").replace("k", " KB").replace("m", " MB")
        middle = {
            who: {what: median(turn[who][what] for turn in turns) for what in turns[0][who]}
            for who in ("ours", "aiohttp")
        }
        ours, plain = middle["ours"], middle["aiohttp"]
        figures.append(
            Figure(
                f"{name} by URL, time beside aiohttp on the loop",
                ours["ms"] / plain["ms"],
                "x",
                detail=f"{ours['ms']:.2f} ms beside {plain['ms']:.2f} ms",
            )
        )
        cpu = ours["frontend_cpu_ms"] + ours["fetching_cpu_ms"]
        figures.append(
            Figure(
                f"{name} by URL, CPU of the frontend beside aiohttp's",
                ours["frontend_cpu_ms"] / plain["frontend_cpu_ms"],
                "x",
                detail=f"{ours['frontend_cpu_ms']:.2f} ms ({cpu:.2f} with the fetching process) "
                f"beside {plain['frontend_cpu_ms']:.2f} ms",
            )
        )
    return figures


def _hostile(port: int, seconds: float) -> dict[str, Any]:
    with servers.triptych(*FLAGS) as server:
        _streams(server, 1.0)
        calm = _streams(server, seconds)
        with _attackers(server, port) as codes:
            wild = _streams(server, seconds)
    return {"calm": calm, "wild": wild, "codes": codes}


def _streams(server: Server, seconds: float) -> dict[str, Any]:
    watch = Watch(server)
    with generator(server.port, TEXT, first_model(server.port)) as load:
        time.sleep(seconds)
    return {"text": load.found, **watch.end()}


@contextmanager
def _attackers(server: Server, port: int) -> Iterator[dict[str, int]]:
    """Name hostile URLs, eight at a time; gives how often each error code came back."""
    codes: Counter[str] = Counter()
    ended = threading.Event()
    model = first_model(server.port)

    def attack(number: int) -> None:
        for path in itertools.islice(itertools.cycle(ENDLESS), number, None):
            if ended.is_set():
                return
            codes[_ask(server.port, model, f"http://127.0.0.1:{port}{path}?{number}")] += 1

    with ThreadPoolExecutor(HOSTILE_AT_ONCE) as threads:
        running = [threads.submit(attack, number) for number in range(HOSTILE_AT_ONCE)]
        yield codes
        ended.set()
    for one in running:
        one.result()


def _ask(port: int, model: str, url: str) -> str:
    content = [{"type": "image_url", "image_url": {"url": url}}]
    body = {"model": model, "messages": [{"role": "user", "content": content}], "max_tokens": 1}
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/v1/chat/completions",
        json.dumps(body).encode(),
        {"Content-Type": "application/json"},
    )
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return str(answer.status)
    except urllib.error.HTTPError as error:
        return str(json.load(error)["error"]["code"])


def _hostile_figures(found: dict[str, Any]) -> list[Figure]:
    figures = []
    calm, wild = found["calm"], found["wild"]
    for what, name in (("ttft_ms", "first token"), ("itl_ms", "between tokens")):
        ours, theirs = (one["text"][what]["p99"] for one in (wild, calm))
        detail = f"{ours:.1f} ms beside {theirs:.1f} ms"
        figures.append(
            Figure(f"8 hostile URLs, text p99, {name}", ours / theirs, "x", TIMES, detail=detail)
        )
    codes = ", ".join(f"{count} {code}" for code, count in sorted(found["codes"].items()))
    work = wild["lag_ms"]["frontend"]["work"]
    name = "8 hostile URLs, longest work of the frontend's event loop in one go"
    figures.append(Figure(name, work, "ms", STALL_MS, detail=codes))
    late, stalls = wild["lag_ms"]["frontend"]["lag"], wild["stalls"]["frontend"]
    name = f"8 hostile URLs, times that the frontend's event loop was over {STALL_MS:g} ms late"
    figures.append(Figure(name, stalls, "", 0, detail=f"latest by {late:.0f} ms"))
    return figures
