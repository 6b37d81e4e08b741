"""Notices when files change, by looking at them from time to time: also where a link is swapped.

Certificates and key files are replaced while a server runs. A change is reported once the files
have stayed the same between two looks, so that half-written pairs of files are rarely read.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable, Sequence

WATCH_SECONDS = 1.0

FileState = tuple[tuple[int, ...], ...]


class FileWatch:
    """``reload`` is called after the files have changed. It handles its own errors."""

    def __init__(
        self,
        paths: Sequence[str],
        reload: Callable[[], Awaitable[None]],
    ) -> None:
        self._paths = paths
        self._reload = reload
        self._loaded = self._seen = file_state(paths)

    async def run(self) -> None:
        """Look at the files until the task is cancelled."""
        while True:
            await asyncio.sleep(WATCH_SECONDS)
            if await asyncio.to_thread(self.look):
                await self._reload()

    def look(self) -> bool:
        """Whether the files have changed, and then stayed the same since the last look."""
        state = file_state(self._paths)
        settled, self._seen = state == self._seen, state
        changed = settled and state != self._loaded
        if changed:
            self._loaded = state
        return changed


def file_state(paths: Sequence[str]) -> FileState:
    """What differs after a file was written or replaced; links are followed."""
    return tuple(_state(path) for path in paths)


def _state(path: str) -> tuple[int, ...]:
    try:
        found = os.stat(path)
    except OSError:
        return ()
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns
