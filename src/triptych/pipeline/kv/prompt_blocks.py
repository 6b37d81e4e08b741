"""The names of a prompt's blocks, as far as they can be told before it is sent.

Text as it is; a media item as the tokens that will take its placeholder's place, if they are known.
An item that nobody has seen ends the chain: no block after it is cached anywhere. Large prompts are
named in pieces, and the event loop turns between them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from msgspec import Struct

from triptych.blocks import MediaInBlock, hash_blocks, hash_salt
from triptych.messages import MediaMeta, Work
from triptych.pipeline.kv.media_layouts import MediaLayout, MediaLayoutCache

PIECE = 8192  # tokens that are named in one turn of the event loop: about a millisecond
UNSEEN = 256  # tokens that an item is taken for while nobody knows it


class PromptBlocks(Struct, frozen=True):
    """One prompt by blocks of one size."""

    block_size: int
    hashes: tuple[int, ...]  # of the full blocks, up to the first item that is unknown
    tokens: int  # of the expanded prompt, as far as it can be told
    media_end: int = 0  # index of the token after the last media item
    known: bool = True  # of all media; else the chain may grow
    metas: tuple[MediaMeta, ...] | None = ()  # of all media, for sure; None: not of all

    @property
    def blocks(self) -> int:
        """All that the prompt needs."""
        return -(-self.tokens // self.block_size)

    @property
    def findable(self) -> int:
        """Blocks that a cache can spare: of a prompt that is held whole, one token is computed."""
        return min(len(self.hashes), (self.tokens - 1) // self.block_size)


async def hash_prompt(
    work: Work,
    learned: MediaLayoutCache,
    block_size: int,
    more: Sequence[int] = (),
    digests: Sequence[bytes] = (),
) -> PromptBlocks:
    """``more``: tokens that were generated after the prompt. ``digests``: of all media; without
    them what stands for an item is likely and not sure, and the chain has no metas of any."""
    places = [learned.find(item) for item in work.media]
    tokens, standing, known = _laid_out(work, places)
    if known:
        tokens += more
    found: list[int] = []
    parent, step = hash_salt(work.salt), max(1, PIECE // block_size) * block_size
    for begin in range(0, len(tokens), step):
        piece = tokens[begin : begin + step]
        media = _by_block(standing, begin, len(piece) // block_size, block_size)
        found += hash_blocks(parent, piece, block_size, media)
        if begin + step < len(tokens):
            parent = found[-1]
            await asyncio.sleep(0)
    length = len(work.prompt) + len(more) - len(places)
    length += sum(UNSEEN if place is None else place.length for place in places)
    end = max((start + place.length for place, start in standing), default=0)
    metas = tuple(
        place.meta
        for place, digest in zip(places, digests, strict=False)
        if place is not None and place.meta is not None and digest == place.digest
    )
    complete = metas if len(metas) == len(places) else None
    return PromptBlocks(block_size, tuple(found), length, end, known, complete)


def _laid_out(
    work: Work, places: Sequence[MediaLayout | None]
) -> tuple[list[int], list[tuple[MediaLayout, int]], bool]:
    """Tokens up to the first unknown item; the items among them and where; whether that is all."""
    tokens: list[int] = []
    standing: list[tuple[MediaLayout, int]] = []
    done = 0
    for item, place in sorted(zip(work.media, places, strict=True), key=lambda pair: pair[0].at):
        tokens += work.prompt[done : item.at]
        if place is None:
            return tokens, standing, False
        standing.append((place, len(tokens)))
        tokens += place.tokens(work.prompt[item.at])
        done = item.at + 1
    tokens += work.prompt[done:]
    return tokens, standing, True


def _by_block(
    standing: Sequence[tuple[MediaLayout, int]], begin: int, count: int, size: int
) -> list[list[MediaInBlock]]:
    """Of each of ``count`` blocks from token ``begin`` on, who stands in it; none: there are no
    media. Indices count from ``begin``."""
    if not standing:
        return []
    found: list[list[MediaInBlock]] = [[] for _ in range(count)]
    for place, start in standing:
        first, end = (start - begin) // size, -(-(start - begin + place.length) // size)
        for block in range(max(0, first), min(count, end)):
            found[block].append((place.key, start - begin))
    return found
