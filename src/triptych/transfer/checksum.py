"""A checksum of much memory that costs little beside moving it.

Sums of the 64-bit words of every 4 KiB, and a CRC over those sums: 27 GB/s where a plain CRC does
4. It tells a page that is missing, old or in another's place; it is no defence against forgery.
Knows no transport.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable

import numpy

_BLOCK = 4096
_SMALL = 16 << 10  # bytes below which the plain CRC is as quick


def checksum(views: Iterable[memoryview]) -> int:
    """Of the views one behind the other. Lets other threads run meanwhile."""
    found = 0
    for view in views:
        whole = 0
        if view.nbytes >= _SMALL:
            whole = view.nbytes // _BLOCK * _BLOCK
            words = numpy.frombuffer(view[:whole], numpy.uint64)
            sums = words.reshape(-1, _BLOCK // 8).sum(axis=1, dtype=numpy.uint64)
            found = zlib.crc32(sums.tobytes(), found)
        found = zlib.crc32(view[whole:], found)
    return found
