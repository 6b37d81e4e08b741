"""How much a key may use: token buckets that refill all the time, and requests at once.

A bucket holds a minute's worth. A request is admitted while something is left of its tokens. What
it uses is known at its end and counted then, so requests at once may use more than is left: the
next one waits until that is refilled too. The clock is monotonic.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from time import monotonic

from msgspec import Struct

from triptych.errors import RateLimitExceeded

MINUTE = 60.0
CONCURRENT_RETRY_SECONDS = 1.0


class KeyLimits(Struct, frozen=True):
    """The limits of a key; 0: none."""

    requests_per_minute: int = 0
    tokens_per_minute: int = 0  # of prompts and of answers
    media_bytes_per_minute: int = 0
    streams: int = 0  # requests at once, streamed or not


class TokenBucket:
    """``limit`` units a minute."""

    def __init__(self, limit: int, clock: Callable[[], float] = monotonic) -> None:
        self.limit = limit
        self._clock = clock
        self._level = float(limit)
        self._at = clock()

    @property
    def level(self) -> float:
        """What is left; less than nothing if more was used."""
        now = self._clock()
        refilled = self._level + (now - self._at) * self.limit / MINUTE
        self._level, self._at = min(float(self.limit), refilled), now
        return self._level

    def take(self, amount: int) -> None:
        self._level = self.level - amount

    def seconds_until(self, amount: float) -> float:
        """How long until this much is left."""
        return max(0.0, (amount - self.level) * MINUTE / self.limit)

    def resize(self, limit: int) -> None:
        """A new limit; what was used stays used."""
        level = self.level
        self._level, self.limit = level + limit - self.limit, limit


class KeyQuota:
    """What the holder of a key has used of its limits."""

    def __init__(self, limits: KeyLimits, clock: Callable[[], float] = monotonic) -> None:
        self.limits = limits
        self.running = 0  # requests that are answered now
        self._clock = clock
        self._requests: TokenBucket | None = None
        self._tokens: TokenBucket | None = None
        self._media: TokenBucket | None = None
        self.change(limits)

    def change(self, limits: KeyLimits) -> None:
        """New limits after a reload; what was used stays used."""
        self.limits = limits
        self._requests = self._resized(self._requests, limits.requests_per_minute)
        self._tokens = self._resized(self._tokens, limits.tokens_per_minute)
        self._media = self._resized(self._media, limits.media_bytes_per_minute)

    def _resized(self, bucket: TokenBucket | None, limit: int) -> TokenBucket | None:
        if not limit:
            return None
        if bucket is None:
            return TokenBucket(limit, self._clock)
        bucket.resize(limit)
        return bucket

    def admit(self) -> None:
        """Count a request, or refuse it."""
        _check(self._tokens, 0.0, "tokens")
        _check(self._requests, 1.0, "requests")
        if self._requests is not None:
            self._requests.take(1)

    def check_media(self) -> None:
        """Refuse media if nothing is left for them."""
        _check(self._media, 0.0, "media bytes")

    def count_media(self, amount: int) -> None:
        if self._media is not None:
            self._media.take(amount)

    def count_tokens(self, amount: int) -> None:
        if self._tokens is not None:
            self._tokens.take(amount)

    def start(self) -> None:
        """A request is answered from now on, until ``end``; refused if too many are."""
        if (limit := self.limits.streams) and self.running >= limit:
            raise RateLimitExceeded(
                f"This key may have {limit} request{'s' if limit > 1 else ''} at a time. Try again "
                "when one has ended.",
                CONCURRENT_RETRY_SECONDS,
            )
        self.running += 1

    def end(self) -> None:
        self.running -= 1

    def headers(self) -> bytes:
        """The usual headers about requests and tokens. ``reset``: until the bucket is full."""
        lines = b""
        for name, bucket in ((b"requests", self._requests), (b"tokens", self._tokens)):
            if bucket is not None:
                lines += (
                    b"x-ratelimit-limit-%b: %d\r\n"
                    b"x-ratelimit-remaining-%b: %d\r\n"
                    b"x-ratelimit-reset-%b: %.3fs\r\n"
                ) % (
                    name,
                    bucket.limit,
                    name,
                    max(0, math.floor(bucket.level)),
                    name,
                    bucket.seconds_until(bucket.limit),
                )
        return lines


def _check(bucket: TokenBucket | None, needed: float, what: str) -> None:
    """Refuse a request unless more than nothing, and at least ``needed``, is left."""
    if bucket is None or (bucket.level > 0 and bucket.level >= needed):
        return
    seconds = bucket.seconds_until(max(needed, 1.0))
    raise RateLimitExceeded(
        f"This key may use {bucket.limit} {what} a minute, and has used them. Try again in "
        f"{math.ceil(seconds)} s.",
        seconds,
    )
