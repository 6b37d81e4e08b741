"""What the suite must know of an engine beforehand. One without an entry can do everything."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from support import sglang_cpu
from triptych.engines.base import ENGINES, EngineKind

KINDS = {**ENGINES, "documented": EngineKind("contract.engines.documented")}
IN_PROCESS = "it runs in the worker's own process: they die together"
ABILITIES = (
    "blind decode",  # it goes on from whatever KV cache it is given
    "grammars",
    "logits",
    "min_tokens",
    "own process",
    "prefix cache",
    "seeds",
    "telling",  # what its prefix cache holds
    "times",  # of its stages
    "unbiased logprobs",
    "word lists",  # bad_words, allowed_token_ids; and log-probabilities of the prompt
)


@dataclass(frozen=True)
class Traits:
    lacks: Mapping[str, str] = field(default_factory=dict)  # abilities, and why it has them not
    process: str = ""  # in the name or command line of the child process that is the engine
    arguments: str = ""  # what it takes to run it on a CPU: --engine-args
    enter: Callable[[], None] = lambda: None  # and whatever else it takes

    def __post_init__(self) -> None:
        assert self.lacks.keys() <= set(ABILITIES)


TRAITS = {
    "fake": Traits(
        lacks={
            "grammars": "its tokens are hashes",
            "logits": "its tokens are hashes",
            "blind decode": "it knows a KV cache that is not of the prompt, and refuses it",
            "own process": IN_PROCESS,
        }
    ),
    "documented": Traits(
        lacks={
            "grammars": "it repeats words",
            "logits": "it repeats words",
            "min_tokens": "it repeats words",
            "word lists": "it repeats words",
            "prefix cache": "it keeps nothing",
            "telling": "it keeps nothing",
            "seeds": "nothing is left to chance",
            "times": "it has no clock",
            "own process": IN_PROCESS,
        }
    ),
    "torch": Traits(lacks={"own process": IN_PROCESS}),
    "vllm": Traits(process="EngineCore"),
    "sglang": Traits(
        lacks={
            "grammars": "without its own tokenizer it has none",
            "seeds": "it heeds them in its deterministic mode alone, which no CPU has",
            "telling": "its adapter does not listen to its events",
            "unbiased logprobs": "bias and penalties are in them, though no temperature",
            "word lists": "it has no such options",
        },
        process="scheduler",
        arguments=sglang_cpu.ARGUMENTS,
        enter=sglang_cpu.enter,
    ),
}


def engine_processes(name: str) -> list[int]:
    """Those below this process that are engines of this name."""
    word = TRAITS.get(name, Traits()).process
    return [pid for pid in _descendants(os.getpid()) if word and _is_named(pid, word)]


def _descendants(pid: int) -> set[int]:
    """Processes below this one, and their children."""
    parents: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                stat = (entry / "stat").read_text()
            except OSError:  # gone a moment ago
                continue
            state, parent = stat.rpartition(")")[2].split()[:2]
            if state not in "ZX":
                parents.setdefault(int(parent), []).append(int(entry.name))
    found: set[int] = set()
    waiting = [pid]
    while waiting:
        children = parents.get(waiting.pop(), [])
        found.update(children)
        waiting += children
    return found


def _is_named(pid: int, word: str) -> bool:
    """Whether a process calls itself so, or was called so."""
    try:
        name = Path(f"/proc/{pid}/comm").read_text()
        line = Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")
    except OSError:
        return False
    return word in name or word in line
