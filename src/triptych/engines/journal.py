"""What a prefix cache stores and removes, written down until it is told.

An engine writes as it goes and takes all of a step at once. While nobody listens nothing is
written. Knows no threads: whoever writes is the one who takes.
"""

from __future__ import annotations

from collections.abc import Sequence

from triptych.blocks import Standing
from triptych.messages import KvEvent, KvRemoved, KvStored, MediaPlace


def name_of(digest: bytes) -> int:
    """64 bits of a block's hash, by which it is told."""
    return int.from_bytes(digest[:8], "little")


class Journal:
    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self.listening = False
        self._events: list[KvStored | list[int]] = []  # a list: names of blocks removed in a row

    def stored(
        self,
        first: int,
        hashes: Sequence[bytes],
        ids: Sequence[int],
        media: Sequence[MediaPlace],
        salt: str,
    ) -> None:
        """The blocks ``hashes[1:]`` of a sequence are found from now on; they follow on the first.

        ``first`` is the number of the first of them; ``ids`` are those of the whole sequence, and
        ``media`` all of its items.
        """
        if not self.listening:
            return
        begin, end = first * self.block_size, (first + len(hashes) - 1) * self.block_size
        parent, *blocks = map(name_of, hashes)
        self._events.append(
            KvStored(
                blocks=tuple(blocks),
                parent=parent if first else None,
                tokens=tuple(ids[begin:end]),
                block_size=self.block_size,
                media=standing(media, begin, end, self.block_size),
                salt="" if first else salt,
            )
        )

    def removed(self, digest: bytes) -> None:
        """A block can't be found any more."""
        if not self.listening:
            return
        if not self._events or not isinstance(self._events[-1], list):
            self._events.append([])
        names = self._events[-1]
        assert isinstance(names, list)
        names.append(name_of(digest))

    def take(self) -> list[KvEvent]:
        """All that was written, in order; the next page is blank."""
        if not self._events:
            return []
        events, self._events = self._events, []
        return [KvRemoved(tuple(e)) if isinstance(e, list) else e for e in events]


def standing(
    media: Sequence[MediaPlace], begin: int, end: int, block_size: int
) -> tuple[tuple[Standing, ...], ...]:
    """Of each block of the tokens from ``begin`` to ``end``, the items that stand in it, with the
    index of their first token seen from ``begin``; nothing at all where none stands in any."""
    near = [one for one in media if one.start < end and one.start + one.length > begin]
    if not near:
        return ()
    blocks: list[list[Standing]] = [[] for _ in range(begin, end, block_size)]
    for one in sorted(near, key=lambda one: one.start):
        start = one.start - begin
        last = (start + one.length - 1) // block_size
        for block in blocks[max(0, start // block_size) : last + 1]:
            block.append((one.key, start))
    return tuple(map(tuple, blocks))
