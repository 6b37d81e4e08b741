"""What Triptych adds to vLLM: EPD with the vllm engine beside vLLM's own server, on a CPU.

The same checkpoint, engine options and load (``vllm bench serve``, random text and random
pictures); both servers run, and are asked in turns with the same prompts. vLLM's own server keeps
its preprocessing and its caches; Triptych brings its own.
"""

from __future__ import annotations

import itertools
import shlex
import time
from dataclasses import dataclass
from statistics import median
from typing import Any

from benchmarks import checkpoints, servers
from benchmarks.kept import Kept
from benchmarks.load import cpu_seconds, first_model
from benchmarks.record import Figure
from benchmarks.vllm_bench import client

ROUNDS = {
    "tiny": 6,
    "middle": 4,
}  # by checkpoint; each side is the first to be asked in half of them
INPUT = 128  # tokens, besides the picture's
SIDE = 224  # pixels
THREADS = "1"  # of the model, on both sides: the other core is for everything else
SPIN_SECONDS = 1.5  # vLLM's processes spin for a second after their last step
LEAST, MOST_MS = 0.97, 3.0


@dataclass(frozen=True)
class Ask:
    """A load: how many requests, of them how many at once, and how long their answers are."""

    at_once: int
    requests: dict[str, int]  # by checkpoint
    output: int

    @property
    def what(self) -> str:
        return "one at a time" if self.at_once == 1 else f"{self.at_once} at once"


MANY = Ask(16, {"tiny": 128, "middle": 32}, 32)
ONE = Ask(1, {"tiny": 32, "middle": 8}, 4)

# As Triptych starts vLLM on a CPU.
OPTIONS = (
    "--enforce-eager",
    "--skip-mm-profiling",
    "--block-size=32",
    f"--kv-cache-memory-bytes={1 << 30}",
)
ENVIRONMENT = {
    "OMP_NUM_THREADS": THREADS,
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "HF_HUB_OFFLINE": "1",
}
KINDS: dict[str, list[str]] = {
    "text": ["--dataset-name", "random"],
    "image": [
        *("--dataset-name", "random-mm"),
        *("--random-mm-base-items-per-request", "1"),
        *("--random-mm-limit-mm-per-prompt", '{"image": 1, "video": 0}'),
        *("--random-mm-bucket-config", f"{{({SIDE}, {SIDE}, 1): 1.0}}"),
    ],
}


def run(quick: bool) -> tuple[list[Figure], dict[str, Any]]:
    kept = Kept("vllm_overhead-quick" if quick else "vllm_overhead")
    for name in ("tiny",) if quick else ROUNDS:
        kept.part(name, lambda name=name: _measure(name, 2 if quick else ROUNDS[name]))
    kept.forget()
    figures = []
    for name, found in kept.found.items():
        for load, sides in found.items():
            figures += _figures(f"{name}, {load}", sides)
    return figures, {"versions": servers.vllm_version(), "when": kept.when, **kept.found}


Rounds = dict[str, list[dict[str, Any]]]  # by side


def _measure(name: str, rounds: int) -> dict[str, Rounds]:
    """By load and side, what every round found."""
    folder = str(checkpoints.ensure(name))
    found: dict[str, Rounds] = {}
    with (
        vllm(folder) as plain,
        triptych(folder) as ours,
        client(servers.VLLM_PYTHON) as bench,
    ):
        sides = {"vllm": plain, "triptych": ours}
        for kind, ask in itertools.product(KINDS, (MANY, ONE)):
            results: Rounds = {side: [] for side in sides}
            for turn in range(rounds + 1):
                for side in sides if turn % 2 else reversed(sides):
                    server = sides[side]
                    time.sleep(SPIN_SECONDS)
                    before = cpu_seconds(server.pid)
                    result = bench(_words(server.port, folder, kind, ask, name, turn))
                    result["cpu_seconds"] = round(cpu_seconds(server.pid) - before, 2)
                    if turn:  # the first one warms up
                        results[side].append(result)
            found[f"{kind}, {ask.what}"] = results
    return found


def vllm(folder: str) -> Any:
    return servers.vllm(
        folder,
        *("--dtype", "float32", "--disable-uvicorn-access-log"),
        *OPTIONS,
        environment=ENVIRONMENT,
    )


def triptych(folder: str, engine: str = "vllm") -> Any:
    flags = [folder, "--engine", engine, "--device", "cpu", "--pattern", "EPD"]
    flags += ["--enable-multimodal", "--cpu-threads", THREADS]
    if engine == "vllm":
        flags += [
            "--engine-python",
            str(servers.VLLM_PYTHON),
            f"--engine-args={shlex.join(OPTIONS)}",
        ]
    return servers.triptych(*flags, environment=ENVIRONMENT)


def _words(port: int, folder: str, kind: str, ask: Ask, name: str, turn: int) -> list[str]:
    """Options of ``vllm bench serve``: in a turn, both sides get the same prompts."""
    requests = ask.requests[name] if turn else ask.at_once
    seed = 1000 * turn + ask.at_once
    return [
        *("--backend", "openai-chat", "--endpoint", "/v1/chat/completions", "--port", str(port)),
        *("--model", folder, "--tokenizer", folder, "--served-model-name", first_model(port)),
        *KINDS[kind],
        *("--random-input-len", str(INPUT), "--random-output-len", str(ask.output)),
        *("--num-prompts", str(requests), "--max-concurrency", str(ask.at_once)),
        *("--seed", str(seed), "--ignore-eos", "--temperature", "0", "--disable-tqdm"),
    ]


def _figures(what: str, sides: Rounds) -> list[Figure]:
    def middle(side: str, key: str) -> float:
        return median(float(one[key]) for one in sides[side])

    speed = {side: middle(side, "output_throughput") for side in sides}
    first = {side: middle(side, "median_ttft_ms") for side in sides}
    cpu = {side: middle(side, "cpu_seconds") for side in sides}
    return [
        Figure(
            f"{what}: tokens/s, Triptych over vLLM",
            speed["triptych"] / speed["vllm"],
            "x",
            LEAST,
            True,
            f"{speed['triptych']:.0f} beside {speed['vllm']:.0f}; "
            f"{cpu['triptych']:.1f} s of CPU beside {cpu['vllm']:.1f} s",
        ),
        Figure(
            f"{what}: TTFT that Triptych adds",
            first["triptych"] - first["vllm"],
            "ms",
            MOST_MS,
            detail=f"medians {first['triptych']:.1f} ms beside {first['vllm']:.1f} ms",
        ),
    ]
