"""A media item before its preparation, by the digest of its file, and after it."""

from __future__ import annotations

import asyncio
import hashlib
from dataclasses import dataclass

from triptych.messages import MediaItem, MediaMeta
from triptych.transfer.base import Array

_INLINE_BYTES = 64 << 10  # hashed on the event loop; more is hashed in a thread


@dataclass(frozen=True, slots=True)
class PreparedMedia:
    """A media item as an encoder takes it: what a recipe made of a file.

    ``encoded``: the client sent the embedding itself, and ``arrays`` is that. Else ``arrays`` holds
    8-bit pixels or a spectrum, as the recipe says.
    """

    meta: MediaMeta
    arrays: tuple[Array, ...]
    cost: int  # patches or spectrum frames in the encoder: the measure of a batch
    encoded: bool = False

    @property
    def size(self) -> int:
        return sum(array.buffer.nbytes for array in self.arrays)


async def digest_of(item: MediaItem) -> bytes:
    """256 bits of an item's kind, form, options and bytes. What it shows has the media key."""
    if len(item.data) <= _INLINE_BYTES:
        return _digest(item)
    return await asyncio.to_thread(_digest, item)


def _digest(item: MediaItem) -> bytes:
    state = hashlib.sha256(f"{item.kind} {item.form} {item.options}\n".encode())
    state.update(item.data)
    return state.digest()
