"""What the frontend costs: its CPU for each request or token, as a ratio to the bare loop.

Bare loop, Triptych (fake engine) and Triptych without tags on the frames between its processes are
measured in turns, each pinned to the same one core, while load and workers have the others; the
figures are medians over the rounds.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from statistics import median
from typing import Any

from benchmarks import servers
from benchmarks.load import Load, first_model, measure, tree
from benchmarks.record import Figure
from benchmarks.servers import Server

STEP_MS = 5
UNTAGGED = servers.ROOT / "benchmarks" / "untagged"
FLAGS = ("--engine", "fake", "--pattern", "EPD", "--enable-multimodal")


@dataclass(frozen=True)
class Scenario:
    name: str
    load: Load
    unit: str  # of load's CPU figures
    target: float | None  # ratio to the bare loop


SCENARIOS = (
    Scenario("short chat, 256 at once", Load("chat", 256), "us_per_request", 1.5),
    # The frontend remembers the ids of texts that it has seen: here every user says something new.
    Scenario(
        "short chat, every text new",
        Load("chat", 256, prompt="Hello, how is order ########?"),
        "us_per_request",
        None,
    ),
    Scenario("streamed token, 256 streams", Load("stream", 256), "us_per_token", 0.8),
    Scenario("1 MB JPEG data URL, 8 at once", Load("image", 8), "us_per_request", 1.2),
)
ALONE = Load("chat", 1)
STEADY = Load("stream", 4)


def run(quick: bool) -> tuple[list[Figure], dict[str, Any]]:
    rounds, seconds = (2, 2.0) if quick else (5, 4.0)
    core, others = servers.cores()
    with (
        servers.bare() as bare,
        servers.triptych(*FLAGS, "--fake-step-ms", str(STEP_MS)) as triptych,
        servers.triptych(
            *FLAGS, "--fake-step-ms", str(STEP_MS), environment={"PYTHONPATH": str(UNTAGGED)}
        ) as untagged,
    ):
        for one in (triptych, untagged):
            servers.pin(list(tree(one.pid)), others)
        servers.pin([bare.pid, triptych.frontend, untagged.frontend], {core})
        both = {
            "bare": (bare, "bare"),
            "triptych": (triptych, first_model(triptych.port)),
            "untagged": (untagged, first_model(untagged.port)),
        }

        def of(load: Load) -> dict[str, list[dict[str, Any]]]:
            found: dict[str, list[dict[str, Any]]] = {name: [] for name in both}
            for _ in range(rounds):
                for name, (server, model) in both.items():
                    found[name].append(
                        _measure(server, model, replace(load, seconds=seconds), max(others))
                    )
            return found

        found = {scenario.name: of(scenario.load) for scenario in SCENARIOS}
        found["one at a time"] = of(ALONE)
        found["four streams"] = of(STEADY)
    return _figures(found), found


def _measure(server: Server, model: str, load: Load, core: int) -> dict[str, Any]:
    pids = {"frontend": server.frontend}
    if server.frontend != server.pid:
        pids["all"] = server.pid
    found = measure(server.port, load, model=model, pids=pids, core=core)
    if found["bad"]:
        raise RuntimeError(f"{found['bad']} requests failed: {found['first_error']}")
    return found


def _figures(found: dict[str, dict[str, list[dict[str, Any]]]]) -> list[Figure]:
    figures = []
    for scenario in SCENARIOS:
        bare, ours, untagged = (
            median(one["cpu"]["frontend"][scenario.unit] for one in found[scenario.name][name])
            for name in ("bare", "triptych", "untagged")
        )
        detail = f"{ours:.1f} us beside {bare:.1f} us; without tags {untagged:.1f} us"
        figures.append(Figure(scenario.name, ours / bare, "x", scenario.target, detail=detail))
    alone = found["one at a time"]
    bare, ours = (
        median(one["latency_ms"]["p50"] for one in alone[name]) for name in ("bare", "triptych")
    )
    detail = f"{ours:.2f} ms beside {bare:.2f} ms"
    figures.append(Figure("added latency, one at a time", ours - bare, "ms", 2.0, detail=detail))
    gaps = [one["itl_ms"] for one in found["four streams"]["triptych"]]
    stalled = 100 * sum(gap["over_35ms"] for gap in gaps) / sum(gap["n"] for gap in gaps)
    detail = f"longest {max(gap['max'] for gap in gaps):.1f} ms; steps of {STEP_MS} ms"
    figures.append(Figure("gaps over 35 ms, 4 streams", stalled, "%", 0.1, detail=detail))
    return figures
