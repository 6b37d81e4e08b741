"""A worker is healthy when something went through its engine, not when a port answers."""

from __future__ import annotations

import struct
import zlib

from triptych.engines.base import Generation, Loaded
from triptych.messages import MediaItem, Sampling, Work

SIDE = 56  # pixels; small, and large enough for every model's smallest picture


async def prove(loaded: Loaded) -> None:
    """One picture through the encoder, one token through the engine, whichever are there."""
    if loaded.encoder is not None:
        await loaded.encoder.encode([MediaItem("image", 0, _picture())])
    if loaded.engine is not None:
        sampling = Sampling(seed=0, max_tokens=1, temperature=0.0)
        work = Work("canary", (1, 2, 3), (), sampling, salt="canary")
        await loaded.engine.generate(Generation(work, "PD", ()), lambda _: None)


def _picture() -> bytes:
    """A grey PNG, written by hand since a worker need not have an imaging library."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        body = kind + data
        return struct.pack(">I", len(data)) + body + struct.pack(">I", zlib.crc32(body))

    header = struct.pack(">IIBBBBB", SIDE, SIDE, 8, 2, 0, 0, 0)  # 8 bit RGB
    rows = (b"\0" + b"\x80" * 3 * SIDE) * SIDE
    return (
        b"\x89PNG\r\n\x1a\n"
        + chunk(b"IHDR", header)
        + chunk(b"IDAT", zlib.compress(rows))
        + chunk(b"IEND", b"")
    )
