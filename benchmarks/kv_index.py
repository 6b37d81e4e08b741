"""What the frontend's index of cached blocks costs: time of a lookup, and memory.

100,000 blocks over four workers, in prompts of 64 to 128 blocks: each prompt at one worker, and
half of it at another, as conversations about the same pictures are; every tenth at all four. A
lookup asks for a whole prompt, of all workers at once. To name blocks is measured apart.
"""

from __future__ import annotations

import random
import time
import tracemalloc
from collections.abc import Callable
from statistics import median
from typing import Any

from benchmarks.record import Figure
from triptych import blocks
from triptych.messages import CacheChange
from triptych.pipeline.kv.index import KvIndex

BLOCKS, WORKERS, BLOCK_SIZE = 100_000, 4, 16
LEAST, MOST = 64, 128  # blocks of a prompt
LIMIT_US = 50.0


def run(quick: bool) -> tuple[list[Figure], dict[str, Any]]:
    draw = random.Random(6)
    prompts = [_prompt(draw) for _ in range(BLOCKS // LEAST)]
    tracemalloc.start()
    index, count = _filled(prompts)
    size, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    prompts = prompts[:count]
    asks = 2_000 if quick else 50_000
    found = _times(lambda: draw.choice(prompts), index.overlap, asks)
    everywhere = _times(lambda: draw.choice(prompts[::10]), index.overlap, asks)
    missed = _times(lambda: _prompt(draw), index.overlap, asks)
    named = _named(draw, 20 if quick else 200)
    details = {
        "blocks": index.reported,
        "lookup_us": {
            "p50": median(found),
            "p99": _high(found),
            "everywhere_p50": median(everywhere),
            "miss_p50": median(missed),
        },
        "bytes_per_block": size / index.reported,
        "name_us_per_1000_tokens": named,
    }
    held = f"{index.reported} blocks over {WORKERS} workers, prompts of {LEAST} to {MOST} blocks"
    return [
        Figure("lookup of a prompt, p50", median(found), "us", LIMIT_US, detail=held),
        Figure("lookup of a prompt, p99", _high(found), "us", LIMIT_US),
        Figure("lookup of a prompt that all hold", median(everywhere), "us", LIMIT_US),
        Figure("lookup of a prompt that nobody holds", median(missed), "us", LIMIT_US),
        Figure(
            "memory of the index", size / 1e6, "MB", detail=f"{size / index.reported:.0f} B a block"
        ),
        Figure("naming the blocks of 1,000 tokens", named, "us"),
    ], details


def _filled(prompts: list[tuple[int, ...]]) -> tuple[KvIndex, int]:
    """An index that is full, and of how many of the prompts."""
    index = KvIndex()
    for at, prompt in enumerate(prompts):
        if index.reported > BLOCKS - 2 * MOST:
            return index, at
        for turn in range(WORKERS if at % 10 == 0 else 2):
            part = prompt[: len(prompt) // 2] if turn and at % 10 else prompt
            # Copied, as from the wire: every worker's names are objects of their own.
            names = tuple(int(str(name)) for name in part)
            index.update(f"EPD-{(at + turn) % WORKERS}", CacheChange(1, names))
    raise AssertionError("too few prompts")


def _prompt(draw: random.Random) -> tuple[int, ...]:
    return tuple(draw.getrandbits(64) for _ in range(draw.randint(LEAST, MOST)))


def _times(
    make: Callable[[], tuple[int, ...]], ask: Callable[[tuple[int, ...]], object], asks: int
) -> list[float]:
    """Microseconds of each, in order of length."""
    times = []
    for _ in range(asks):
        names = make()
        start = time.perf_counter()
        ask(names)
        times.append(1e6 * (time.perf_counter() - start))
    return sorted(times)


def _named(draw: random.Random, asks: int) -> float:
    tokens = tuple(draw.randrange(150_000) for _ in range(1000))
    return median(
        _times(lambda: tokens, lambda some: tuple(blocks.hash_blocks(1, some, BLOCK_SIZE)), asks)
    )


def _high(times: list[float]) -> float:
    return times[len(times) * 99 // 100]
