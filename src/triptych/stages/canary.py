"""A worker is healthy when something went through its engine, not when a port answers."""

from __future__ import annotations

import itertools
import struct
import zlib

from triptych.engines.base import Engine, Generation
from triptych.errors import MediaError, StartError
from triptych.messages import MediaItem, Sampling, Work
from triptych.stages.encode import EncodeStage

SIDE = 56  # pixels; small, and large enough for every model's smallest picture
RATE, SAMPLES = 16000, 8000  # half a second
SALT = "canary"  # nobody else's cache is touched
_numbers = itertools.count()


async def check_start(engine: Engine | None, encoding: EncodeStage | None) -> None:
    """One media item through decoder and encoder, one token through the engine, whichever are
    there."""
    if encoding is not None:
        try:
            await encode_canary(encoding)
        except MediaError as error:
            raise StartError(
                "a small item was to show that media can be decoded here, and could not be: "
                f"{error.message} `triptych doctor` tries the same; are --limits-... too low?"
            ) from error
    if engine is not None:
        await generate_canary(engine)


async def encode_canary(encoding: EncodeStage) -> None:
    """Through the encoder itself, whatever is kept of those before."""
    if (item := _item(encoding)) is not None:
        await encoding.encode_alone(item, f"{SALT} {next(_numbers)}")


async def generate_canary(engine: Engine) -> None:
    # With logprobs, since engines may compile what makes them when they are first asked for.
    sampling = Sampling(seed=0, max_tokens=1, temperature=0.0, logprobs=1)
    work = Work("canary", (1, 2, 3), (), sampling, salt=SALT)
    await engine.generate(Generation(work, "PD", ()), lambda _: None)


def _item(encoding: EncodeStage) -> MediaItem | None:
    """A picture, or a sound for a model that sees nothing. Clips alone can't be tried: to make one
    takes an encoder of videos."""
    if encoding.takes("image"):
        return MediaItem("image", 0, canary_picture())
    return MediaItem("audio", 0, canary_sound()) if encoding.takes("audio") else None


def canary_picture() -> bytes:
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


def canary_sound() -> bytes:
    """A WAV file of a soft buzz: 16 bit, mono."""
    samples = b"".join(struct.pack("<h", (i * 37) % 2048 - 1024) for i in range(SAMPLES))
    form = struct.pack("<HHIIHH", 1, 1, RATE, 2 * RATE, 2, 16)
    body = b"WAVEfmt " + struct.pack("<I", len(form)) + form
    body += b"data" + struct.pack("<I", len(samples)) + samples
    return b"RIFF" + struct.pack("<I", len(body)) + body
