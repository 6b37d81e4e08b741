"""The block hashes of a prompt, as far as they can be known before it is sent.

Text is hashed as it is; a media item as the tokens that will replace its placeholder, if these are
known. An unknown item ends the hashes: no block after it is cached anywhere. Long prompts are
hashed in pieces, so that the event loop runs between them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from msgspec import Struct

from triptych.blocks import MediaInBlock, hash_blocks, hash_salt
from triptych.messages import MediaMeta, Work
from triptych.pipeline.kv.media_layouts import MediaLayout, MediaLayoutCache

PIECE_TOKENS = 8192  # hashed in one turn of the event loop: about a millisecond
UNKNOWN_ITEM_TOKENS = 256  # that an unknown item is assumed to have


class PromptBlocks(Struct, frozen=True):
    """One prompt in blocks of one size."""

    block_size: int
    hashes: tuple[int, ...]  # of the full blocks, up to the first unknown item
    tokens: int  # of the expanded prompt, as far as known
    media_end: int = 0  # index of the token after the last media item
    complete: bool = True  # all media are known; else there may be more hashes later
    metas: tuple[MediaMeta, ...] | None = ()  # of all media, for certain; None: not of all

    @property
    def count(self) -> int:
        """Blocks that the whole prompt needs."""
        return -(-self.tokens // self.block_size)

    @property
    def cacheable(self) -> int:
        """Blocks that a cache can save: the last token is always computed."""
        return min(len(self.hashes), (self.tokens - 1) // self.block_size)


async def hash_prompt(
    work: Work,
    layouts: MediaLayoutCache,
    block_size: int,
    generated: Sequence[int] = (),
    digests: Sequence[bytes] = (),
) -> PromptBlocks:
    """Hash a prompt, and the tokens ``generated`` after it.

    ``digests``: of all bytes of each media item. Without them an item is only likely the one that
    its layout is of, and the result has no metas.
    """
    found = [layouts.find(item) for item in work.media]
    tokens, placed, complete = _expand(work, found)
    if complete:
        tokens += generated
    hashes: list[int] = []
    parent, step = hash_salt(work.salt), max(1, PIECE_TOKENS // block_size) * block_size
    for begin in range(0, len(tokens), step):
        piece = tokens[begin : begin + step]
        media = _media_by_block(placed, begin, len(piece) // block_size, block_size)
        hashes += hash_blocks(parent, piece, block_size, media)
        if begin + step < len(tokens):
            parent = hashes[-1]
            await asyncio.sleep(0)
    length = len(work.prompt) + len(generated) - len(found)
    length += sum(UNKNOWN_ITEM_TOKENS if layout is None else layout.length for layout in found)
    end = max((start + layout.length for layout, start in placed), default=0)
    metas = tuple(
        layout.meta
        for layout, digest in zip(found, digests, strict=False)
        if layout is not None and layout.meta is not None and digest == layout.digest
    )
    certain = metas if len(metas) == len(found) else None
    return PromptBlocks(block_size, tuple(hashes), length, end, complete, certain)


def _expand(
    work: Work, layouts: Sequence[MediaLayout | None]
) -> tuple[list[int], list[tuple[MediaLayout, int]], bool]:
    """Tokens up to the first unknown item, the items among them with their start, and whether that
    is the whole prompt."""
    tokens: list[int] = []
    placed: list[tuple[MediaLayout, int]] = []
    done = 0
    for item, layout in sorted(zip(work.media, layouts, strict=True), key=lambda pair: pair[0].at):
        tokens += work.prompt[done : item.at]
        if layout is None:
            return tokens, placed, False
        placed.append((layout, len(tokens)))
        tokens += layout.tokens(work.prompt[item.at])
        done = item.at + 1
    tokens += work.prompt[done:]
    return tokens, placed, True


def _media_by_block(
    placed: Sequence[tuple[MediaLayout, int]], begin: int, count: int, size: int
) -> list[list[MediaInBlock]]:
    """The media items in each of ``count`` blocks from token ``begin`` on, with starts that count
    from ``begin``. Empty: there are no media."""
    if not placed:
        return []
    blocks: list[list[MediaInBlock]] = [[] for _ in range(count)]
    for layout, start in placed:
        first, end = (start - begin) // size, -(-(start - begin + layout.length) // size)
        for block in range(max(0, first), min(count, end)):
            blocks[block].append((layout.key, start - begin))
    return blocks
