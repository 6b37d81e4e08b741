"""Memory that bodies are received into, used again and again.

New memory is costly: it is zeroed and its pages are faulted in, which for a picture takes longer
than reading it. A buffer that anybody still has a view of is never given to another request.
"""

from __future__ import annotations

import mmap

from triptych.runtime.process import allocate_lazily

SMALL = 64 << 10  # smaller bodies get memory of their own size
SIZE = 2 << 20  # of those that are used again
KEPT = 16

BodyBuffer = bytearray | mmap.mmap


class BufferPool:
    def __init__(self) -> None:
        self._free: list[bytearray] = []

    def take(self, length: int) -> BodyBuffer:
        """Memory for a body; it may be larger. Of a very large one it is there as it is filled."""
        if length <= SMALL:
            return bytearray(length)
        if length > SIZE:
            return _mapped(length)
        return self._free.pop() if self._free else bytearray(SIZE)

    def clear(self) -> None:
        """Keep none: nobody has needed one for a while."""
        self._free.clear()

    def give(self, buffer: BodyBuffer) -> None:
        if not isinstance(buffer, bytearray) or len(buffer) != SIZE or len(self._free) == KEPT:
            return
        try:
            buffer.append(buffer.pop())  # refused while there is a view of it
        except BufferError:
            return
        self._free.append(buffer)


def _mapped(length: int) -> BodyBuffer:
    """The kernel refuses memory in a way of its own."""
    try:
        return allocate_lazily(length)
    except OSError as error:
        raise MemoryError(str(error)) from None
