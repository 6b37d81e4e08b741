"""The memory budget of media that requests load: so many bytes for one request, so many for all.

A small request can name many large files. So whatever is fetched, read or taken from the uploads
needs a reservation, from before it is loaded until its request ends. A request that finds none
waits, tenants taking turns, for a limited time. Request bodies are counted elsewhere.
"""

from __future__ import annotations

import asyncio
from typing import Self

from triptych.config import Config
from triptych.errors import MediaTooLarge, Overloaded
from triptych.runtime.concurrency import FairSemaphore


def budget_exhausted() -> Overloaded:
    return Overloaded("There is no memory for so many media at the moment. Try again.")


def request_media_too_large(limit: int, place: str | None = None) -> MediaTooLarge:
    return MediaTooLarge(
        f"The media of the request have over {limit} bytes together, the most that is taken.",
        param=place,
    )


class MediaBudget:
    """The budget of one frontend."""

    def __init__(self, config: Config) -> None:
        limits = config.limits
        self._semaphore = FairSemaphore(
            limits.loaded_media_bytes, config.share(limits.loaded_media_bytes)
        )
        self._limit = min(limits.request_media_bytes, self._semaphore.per_key)
        self._seconds = limits.fetch_seconds

    @property
    def counters(self) -> dict[str, float]:
        return {
            "loaded_bytes": self._semaphore.in_use,
            "loaded_peak_bytes": self._semaphore.peak,
            "loaded_waiting": self._semaphore.waiting,
        }

    def reserve(self, tenant: str) -> MediaReservation:
        return MediaReservation(self._semaphore, tenant, self._limit, self._seconds)


class MediaReservation:
    """The bytes that one request or one fetch has reserved, released at the end of the scope."""

    def __init__(self, semaphore: FairSemaphore, tenant: str, limit: int, seconds: float) -> None:
        self.limit = limit
        self.size = 0  # bytes, with those that it waits for
        self.waiting = False  # for bytes, or was when it was cancelled
        self._semaphore = semaphore
        self._tenant = tenant
        self._seconds = seconds

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.shrink_to(0)

    async def add(self, size: int) -> None:
        """Reserve so many bytes more. Raises MediaTooLarge, or Overloaded after a while."""
        if self.size + size > self.limit:
            raise request_media_too_large(self.limit)
        self.size += size
        self.waiting = True
        try:
            async with asyncio.timeout(self._seconds):
                await self._semaphore.acquire(self._tenant, size)
            self.waiting = False
        except TimeoutError:
            raise budget_exhausted() from None
        finally:
            self.size -= size if self.waiting else 0

    def shrink_to(self, size: int) -> None:
        """Release all but so many bytes."""
        if size < self.size:
            self._semaphore.release(self._tenant, self.size - size)
            self.size = size

    def transfer_to(self, to: MediaReservation) -> None:
        """Hand all bytes over to another reservation of the same tenant."""
        to.size += self.size
        self.size = 0
