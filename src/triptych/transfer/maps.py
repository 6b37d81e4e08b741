"""The reader's maps of other processes' segments, kept because mapping costs and reading does not.

A map is dropped when its owner is gone or has given the segment up, and when too many others have
been used since. Views that are still about keep theirs alive, so dropping is always safe.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict

from triptych.transfer.layout import INLOOP
from triptych.transfer.segment import Attached

# A map holds memory that its owner may have given up: not for longer than this.
SWEEP_SECONDS = 2.0

Key = tuple[int, int, bytes, int]  # pid, descriptor, nonce, epoch


class Maps:
    def __init__(self, limit: int = 1024) -> None:
        self._limit = limit
        self._maps: OrderedDict[Key, Attached] = OrderedDict()
        self._timer: asyncio.TimerHandle | None = None

    def __len__(self) -> int:
        return len(self._maps)

    async def find(self, pid: int, fd: int, nonce: bytes, epoch: int, size: int) -> Attached:
        """The map of a segment, made now if need be. NotASegment if the owner has it no more."""
        key = (pid, fd, nonce, epoch)
        attached = self._maps.get(key)
        if attached is None or not attached.alive():
            attached = None
            self._drop(key)
            if size <= INLOOP:
                attached = Attached(pid, fd, nonce, epoch)
            else:
                attached = await asyncio.to_thread(Attached, pid, fd, nonce, epoch)
            self._maps[key] = attached
            if len(self._maps) > self._limit:
                self._drop(next(iter(self._maps)))
            self._arm()
        if key in self._maps:
            self._maps.move_to_end(key)
        return attached

    def sweep(self) -> None:
        """Drop the maps whose owner has given them up."""
        self._timer = None
        self._drop(*[key for key, attached in self._maps.items() if not attached.alive()])
        self._arm()

    def close(self) -> None:
        self._maps.clear()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _drop(self, *keys: Key) -> None:
        # In a thread: unmapping the last map of a large segment makes the kernel free it.
        gone = [self._maps.pop(key) for key in keys if key in self._maps]
        if gone:
            asyncio.get_running_loop().run_in_executor(None, gone.clear)

    def _arm(self) -> None:
        if self._maps and self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(SWEEP_SECONDS, self.sweep)
