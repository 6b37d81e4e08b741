"""This checkout beside another one, in turns: ``python -m benchmarks.compare CHECKOUT``.

CHECKOUT has its own ``.venv``. Both servers run at the same time and get the same load one after
the other, in short turns whose order changes, so that whatever else the machine does meets both.
The figures are medians over the turns, and ratios of this checkout to the other. Nothing is saved.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks import servers
from benchmarks.load import Load, first_model, measure, tree

FAKE = ("--engine", "fake", "--enable-multimodal", "--fake-step-ms", "5")
NEW_TEXT = "Hello, how is order ########?"


@dataclass(frozen=True)
class Comparison:
    name: str
    flags: tuple[str, ...]
    load: Load
    unit: str
    whole: bool = False  # CPU of all processes of the server, not of its frontend alone


COMPARISONS = (
    Comparison(
        "frontend: short chat", (*FAKE, "--pattern=EPD"), Load("chat", 64), "us_per_request"
    ),
    Comparison(
        "frontend: chat, every text new",
        (*FAKE, "--pattern=EPD"),
        Load("chat", 64, prompt=NEW_TEXT),
        "us_per_request",
    ),
    Comparison(
        "frontend: streamed token", (*FAKE, "--pattern=EPD"), Load("stream", 64), "us_per_token"
    ),
    Comparison("frontend: 1 MB JPEG", (*FAKE, "--pattern=EPD"), Load("image", 4), "us_per_request"),
    Comparison(
        "torch engine: token of 16 streams",
        ("--pattern=EPD",),
        Load("stream", 16, prompt=NEW_TEXT, extra={"ignore_eos": True}),
        "us_per_token",
        whole=True,
    ),
    Comparison("torch engine, EPD: first token", ("--pattern=EPD",), Load("chat", 1), "ttft"),
    Comparison("torch engine, E/P/D: first token", ("--pattern=E/P/D",), Load("chat", 1), "ttft"),
    Comparison(
        "routing by KV cache: chat, every text new",
        (*FAKE, "--pattern=EPD*2", "--routing=kv"),
        Load("chat", 32, prompt=NEW_TEXT),
        "us_per_request",
    ),
)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.compare", description=__doc__)
    parser.add_argument("checkout", type=Path, help="folder of the other one, with its .venv")
    parser.add_argument("--turns", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=1.5, help="of one turn")
    args = parser.parse_args()
    pythons = {"this": sys.executable, "other": str(args.checkout / ".venv/bin/python")}
    print(
        "| what | this | other | this over other, median (lowest to highest turn) |\n"
        "|---|---|---|---|"
    )
    for comparison in COMPARISONS:
        print(_row(comparison, pythons, args.turns, args.seconds), flush=True)


def _row(comparison: Comparison, pythons: dict[str, str], turns: int, seconds: float) -> str:
    found: dict[str, list[float]] = {name: [] for name in pythons}
    with contextlib.ExitStack() as stack:
        running = {
            name: stack.enter_context(servers.triptych(*comparison.flags, python=python))
            for name, python in pythons.items()
        }
        for turn in range(turns):
            names = list(running) if turn % 2 else list(running)[::-1]
            for name in names:
                found[name].append(_measure(comparison, running[name], seconds))
    ratios = [this / other for this, other in zip(found["this"], found["other"], strict=True)]
    this, other = median(found["this"]), median(found["other"])
    spread = f"{min(ratios):.2f} to {max(ratios):.2f}"
    return f"| {comparison.name} | {this:.1f} | {other:.1f} | {median(ratios):.3f} ({spread}) |"


def _measure(comparison: Comparison, server: servers.Server, seconds: float) -> float:
    members = tree(server.pid) if comparison.whole else [server.frontend]
    load = replace(comparison.load, seconds=seconds, warm_up=0.2)
    found: dict[str, Any] = measure(
        server.port,
        load,
        model=first_model(server.port),
        pids={str(pid): pid for pid in members},
    )
    if comparison.unit == "ttft":
        return float(found["ttft_ms" if "ttft_ms" in found else "latency_ms"]["p50"])
    return float(sum(spent[comparison.unit] for spent in found["cpu"].values()))


if __name__ == "__main__":
    main()
