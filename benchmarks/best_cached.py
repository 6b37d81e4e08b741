"""The most tokens that a prefix cache could have given to requests that were answered.

As if one worker that forgets nothing had seen all of them: of each prompt the blocks that stood in
any prompt or answer that had ended before it was sent.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Protocol

from triptych import blocks

BLOCK = 16  # tokens, of the fake and the torch engine


class Answered(Protocol):
    """One answered request."""

    @property
    def begun(self) -> float: ...
    @property
    def ended(self) -> float: ...
    @property
    def prompt(self) -> tuple[int, ...]: ...  # expanded
    @property
    def made(self) -> tuple[int, ...]: ...
    @property
    def pictures(self) -> tuple[int, ...]: ...  # in the order of the prompt


def best_cached(answered: Sequence[Answered]) -> int:
    moments = [(one.begun, 1, one) for one in answered] + [(one.ended, 0, one) for one in answered]
    seen: set[int] = set()
    best = 0
    for _, begins, one in sorted(moments, key=lambda moment: moment[:2]):
        if begins:
            found = _names(one.pictures, one.prompt)
            count = next((i for i, name in enumerate(found) if name not in seen), len(found))
            best += BLOCK * min(count, (len(one.prompt) - 1) // BLOCK)
        else:  # the last token has no keys and values yet
            seen.update(_names(one.pictures, one.prompt + one.made[:-1]))
    return best


def _names(pictures: tuple[int, ...], ids: tuple[int, ...]) -> list[int]:
    """Of the blocks of a prompt, where the placeholders of pictures are the longest runs."""
    runs, at = list[tuple[int, int]](), 0  # length, start
    for _, run in itertools.groupby(ids):
        length = sum(1 for _ in run)
        runs.append((length, at))
        at += length
    longest = sorted(runs, reverse=True)[: len(pictures)]
    spans = [
        (picture.to_bytes(4, "big"), start, start + length)
        for picture, (start, length) in zip(
            pictures, sorted((start, length) for length, start in longest), strict=True
        )
    ]
    media = [
        [(key, start) for key, start, end in spans if start < begin + BLOCK and end > begin]
        for begin in range(0, len(ids), BLOCK)
    ]
    return list(blocks.hash_blocks(blocks.hash_salt(""), ids, BLOCK, media))
