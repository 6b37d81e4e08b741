"""The identity of a file's bytes: what it shows is for the media key to say."""

from __future__ import annotations

import asyncio
import hashlib

from triptych.messages import MediaItem

_INLINE_BYTES = 64 << 10  # bytes that are hashed on the event loop; more goes to a thread


async def digest_of(item: MediaItem) -> bytes:
    """256 bits of kind, form and bytes."""
    if len(item.data) <= _INLINE_BYTES:
        return _digest(item)
    return await asyncio.to_thread(_digest, item)


def _digest(item: MediaItem) -> bytes:
    state = hashlib.sha256(f"{item.kind} {item.form}\n".encode())
    state.update(item.data)
    return state.digest()
