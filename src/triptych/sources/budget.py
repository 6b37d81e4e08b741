"""Bytes of media that requests hold besides their bodies: so many for one, so many for all.

A small request can name large files, and many of them. So what is fetched, read or found among the
uploads needs room, from before it is there until its request ends. Who finds none waits, tenants
taking turns, but not for long.
"""

from __future__ import annotations

import asyncio
from typing import Self

from triptych.config import Config
from triptych.errors import MediaTooLarge, Overloaded
from triptych.runtime.concurrency import FairSemaphore


def budget_exhausted() -> Overloaded:
    return Overloaded("There is no room for so many media at the moment. Try again.")


def request_media_too_large(limit: int, place: str | None = None) -> MediaTooLarge:
    return MediaTooLarge(
        f"The media of the request have over {limit} bytes together, the most that is taken.",
        param=place,
    )


class MediaBudget:
    """All the room of one frontend."""

    def __init__(self, config: Config) -> None:
        limits = config.limits
        self._shares = FairSemaphore(
            limits.loaded_media_bytes, config.share(limits.loaded_media_bytes)
        )
        self._limit = min(limits.request_media_bytes, self._shares.per_key)
        self._seconds = limits.fetch_seconds

    @property
    def counters(self) -> dict[str, float]:
        return {
            "loaded_bytes": self._shares.in_use,
            "loaded_peak_bytes": self._shares.peak,
            "loaded_waiting": self._shares.waiting,
        }

    def hold(self, tenant: str) -> MediaReservation:
        return MediaReservation(self._shares, tenant, self._limit, self._seconds)


class MediaReservation:
    """What one request holds, or one fetch; at the end of the scope it is given back."""

    def __init__(self, shares: FairSemaphore, tenant: str, limit: int, seconds: float) -> None:
        self.limit = limit
        self.size = 0  # bytes, also those that are waited for
        self.waits = False  # for room, or did when it was cancelled
        self._shares = shares
        self._tenant = tenant
        self._seconds = seconds

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.keep(0)

    async def take(self, size: int) -> None:
        """So many bytes more. Raises MediaTooLarge, or Overloaded after a while."""
        if self.size + size > self.limit:
            raise request_media_too_large(self.limit)
        self.size += size
        self.waits = True
        try:
            async with asyncio.timeout(self._seconds):
                await self._shares.acquire(self._tenant, size)
            self.waits = False
        except TimeoutError:
            raise budget_exhausted() from None
        finally:
            self.size -= size if self.waits else 0

    def keep(self, size: int) -> None:
        """Give back all but so many bytes."""
        if size < self.size:
            self._shares.release(self._tenant, self.size - size)
            self.size = size

    def pass_on(self, to: MediaReservation) -> None:
        """All of it is another's of the same tenant from now on."""
        to.size += self.size
        self.size = 0
