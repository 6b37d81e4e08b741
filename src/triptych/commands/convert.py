"""``triptych convert-embeddings``: converts a torch file to safetensors, inside the sandbox."""

from __future__ import annotations

from pathlib import Path

from triptych.config import Limits
from triptych.errors import InvalidConfig, ServiceError
from triptych.media.decoder_channel import DecoderSetup
from triptych.media.decoder_process import DecoderProcess
from triptych.media.process_monitor import DecoderProcessLost
from triptych.messages import Failure, MediaItem, MediaKind
from triptych.recipe import Recipes

PREPARER = "triptych.media.convert"
COPIES = 6  # of the file in memory during conversion, at most
TORCH_BYTES = 2 << 30  # memory of torch itself
SECONDS = 600.0


def run(source: Path, target: Path, kind: MediaKind) -> int:
    """Write the tensors of ``source`` to ``target``; an unnamed one is called ``{kind}_embeds``."""
    try:
        data = source.read_bytes()
    except OSError as error:
        raise InvalidConfig(f"{source} cannot be read: {error.strerror}") from None
    if target.exists():
        raise InvalidConfig(f"{target} exists already. Name another file.")
    content = _convert(source, data, kind)
    try:
        with target.open("xb") as file:
            file.write(content)
    except OSError as error:
        raise InvalidConfig(f"{target} cannot be written: {error.strerror}") from None
    print(f"{target}: {target.stat().st_size} bytes")
    return 0


def _convert(source: Path, data: bytes, kind: MediaKind) -> memoryview:
    limits = Limits(
        media_bytes=max(Limits().media_bytes, 2 * len(data)),
        decode_bytes=TORCH_BYTES + COPIES * len(data),
        decode_seconds=SECONDS,
    )
    setup = DecoderSetup(Recipes(""), limits, True, PREPARER)
    try:
        child = DecoderProcess(setup)
        result = child.prepare(MediaItem(kind, 0, data, "embeds"), lambda held: held.clear())
        child.close()
    except (DecoderProcessLost, OSError, ServiceError) as error:
        raise InvalidConfig(f"{source} cannot be converted: the sandbox ended: {error}") from None
    if isinstance(result, Failure):
        raise InvalidConfig(f"{source} cannot be converted: {result.message}")
    return result.arrays[0].buffer
