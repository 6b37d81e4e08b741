"""A list of JPEG frames as one file: what a ``data:video/jpeg`` URL becomes.

A mark, then each frame after its length. No decoder here: the frames are decoded in the sandbox.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

from triptych.errors import InvalidMedia

_MARK = b"\x00triptych frames\n"  # no video file begins like this
_LENGTH = struct.Struct("<I")


def join_frames(frames: Sequence[bytes]) -> bytes:
    return b"".join([_MARK, *(piece for f in frames for piece in (_LENGTH.pack(len(f)), f))])


def is_frame_list(data: bytes | memoryview) -> bool:
    return bytes(data[: len(_MARK)]) == _MARK


def split_frames(data: memoryview) -> list[memoryview]:
    """The frames of a file that begins like a list. Raises InvalidMedia if it is damaged."""
    frames, at = [], len(_MARK)
    while at < len(data):
        start = at + _LENGTH.size
        if start > len(data):
            raise InvalidMedia("The list of frames is cut short.")
        at = start + _LENGTH.unpack_from(data, at)[0]
        if at > len(data):
            raise InvalidMedia("The list of frames is cut short.")
        frames.append(data[start:at])
    if not frames:
        raise InvalidMedia("The list of frames is empty.")
    return frames
