"""``--engine-args``: split into words, checked, and read where Triptych itself needs a value."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping

from triptych.config import Config
from triptych.errors import InvalidConfig

# How vLLM, SGLang and TensorRT-LLM name the numbers of GPUs that one engine uses,
PARALLEL = {
    "tensor": {"tensor-parallel-size", "tp", "tp-size"},
    "pipeline": {"pipeline-parallel-size", "pp", "pp-size"},
}
# and the memory of a GPU that it takes.
MEMORY = {
    "gpu-memory-utilization",
    "kv-cache-memory-bytes",
    "mem-fraction-static",
    "free-gpu-memory-fraction",
    "kv-cache-free-gpu-memory-fraction",
    "kv-cache-config.free-gpu-memory-fraction",
}


def split_arguments(text: str) -> list[str]:
    try:
        return shlex.split(text)
    except ValueError as error:
        raise InvalidConfig(f"--engine-args can't be read as a command line: {error}") from None


def refuse_arguments(
    words: list[str],
    refused: Mapping[str, str],
    canonical: Callable[[str], str] = lambda name: name,
) -> None:
    """Raise InvalidConfig for an option that Triptych sets itself.

    ``refused``: options, and what to do instead. ``canonical``: the name of an option that has
    several.
    """
    for word in words:
        name = canonical(word.partition("=")[0].replace("_", "-"))
        if name in refused:
            raise InvalidConfig(f"--engine-args {name} is set by Triptych: {refused[name]}")


def option_value(words: list[str], names: set[str]) -> str | None:
    """The value of the last of these options (named without leading dashes); None: not given."""
    found = None
    for at, word in enumerate(words):
        name, equals, text = word.partition("=")
        if word.startswith("-") and name.lstrip("-").replace("_", "-") in names:
            found = text if equals else "".join(words[at + 1 : at + 2])
    return found


def gpus_per_engine(config: Config) -> int:
    """How many GPUs one engine uses."""
    words, count = split_arguments(config.engine_args), 1
    for names in PARALLEL.values():
        given = option_value(words, names) or "1"
        if not given.isdecimal() or not int(given):
            raise InvalidConfig(f"--engine-args: {given!r} is not a number of GPUs")
        count *= int(given)
    return count


def sets_gpu_memory(config: Config) -> bool:
    """Whether the operator sets how much of a GPU's memory an engine takes."""
    return option_value(split_arguments(config.engine_args), MEMORY) is not None
