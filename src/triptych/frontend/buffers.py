"""Memory that bodies are received into, used again and again.

New memory is costly: it is zeroed and its pages are faulted in, which for a picture takes longer
than reading it. A buffer that anybody still has a view of is never given to another request.
"""

from __future__ import annotations

SMALL = 64 << 10  # smaller bodies get memory of their own size
SIZE = 2 << 20  # a body gets no more than this before any byte of it has come
KEPT = 16


class Buffers:
    def __init__(self) -> None:
        self._free: list[bytearray] = []

    def take(self, length: int) -> bytearray:
        """A buffer for the first bytes of a body; it may be larger than that."""
        if length <= SMALL:
            return bytearray(length)
        return self._free.pop() if self._free else bytearray(SIZE)

    def give(self, buffer: bytearray) -> None:
        if len(buffer) != SIZE or len(self._free) == KEPT:
            return
        try:
            buffer.append(buffer.pop())  # refused while there is a view of it
        except BufferError:
            return
        self._free.append(buffer)
