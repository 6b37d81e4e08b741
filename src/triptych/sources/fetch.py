"""Media from http and https URLs, by one client that trusts neither URL nor server.

Each hop of a redirect is read and judged as if a client had named it. One deadline covers names,
redirects and body. The bytes that servers send are parsed elsewhere: here arrive a status, a few
headers and a body in memory.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from functools import partial

from msgspec import Struct

from triptych.config import Config
from triptych.errors import MediaError, MediaFetchTimeout, ServiceError
from triptych.runtime.caching import SingleFlight
from triptych.runtime.concurrency import FairSemaphore
from triptych.sources.budget import (
    MediaBudget,
    MediaReservation,
    budget_exhausted,
    request_media_too_large,
)
from triptych.sources.fetch_cache import FetchCache, FetchedFile
from triptych.sources.http_client import FetchClient, FetchRequest, fetch_failed
from triptych.sources.url import (
    AllowedDomains,
    MediaURL,
    network_blocked,
    parse_url,
    resolve_redirect,
    url_blocked,
)

MAX_REDIRECTS = 5
RESERVE_STEP = 1 << 20  # bytes that room is taken for at once
MAX_FETCHES = 512  # at once,
MAX_FETCHES_PER_TENANT = (
    128  # and of those, for one tenant: slow servers take up their turns alone,
)
MAX_FETCHES_PER_HOST = 16  # and for it, from one host
_MOVED = frozenset({301, 302, 303, 307, 308})


class _Got(Struct, frozen=True):
    """The answer at the end of the redirects; no data: nothing has changed since it was kept."""

    data: bytes | memoryview | None
    url: str
    headers: Mapping[str, str]


class _Landed(Struct, frozen=True):
    data: bytes | memoryview
    holder: MediaReservation | None  # whose room it has by now; none: it was here before


class Fetcher:
    """All fetches of one frontend: the same URL asked for twice at once in a scope flies once."""

    def __init__(self, config: Config, client: FetchClient, room: MediaBudget) -> None:
        self._limit = config.limits.media_bytes
        self._seconds = config.limits.fetch_seconds
        self._private = config.allow_private_media
        self._domains = AllowedDomains(config.allowed_media_domains)
        self._client = client
        self._room = room
        self._cache = FetchCache(config.cache.fetched)
        self._flights: SingleFlight[_Landed] = SingleFlight()
        self._holds: dict[
            tuple[str, str], list[MediaReservation]
        ] = {}  # of those who wait for a flight
        self._fetches = FairSemaphore(MAX_FETCHES, MAX_FETCHES_PER_TENANT)  # by tenant
        self._hosts = FairSemaphore(MAX_FETCHES, MAX_FETCHES_PER_HOST)  # by tenant and host
        self._counts = {
            "fetched_files": 0.0,
            "fetched_bytes": 0.0,
            "fetch_failures": 0.0,
            "fetch_cache_hits": 0.0,
            "fetch_cache_misses": 0.0,
        }

    @property
    def counters(self) -> dict[str, float]:
        kept = {
            "fetch_process_losses": self._client.losses,
            "fetch_cache_evictions": self._cache.files.evictions,
            "fetch_cache_bytes": self._cache.files.bytes,
        }
        return self._counts | kept

    async def fetch(self, text: str, scope: str, hold: MediaReservation) -> bytes | memoryview:
        """The file at a URL, from here if the server permits. Cancelled: the others fetch on."""
        try:
            landed = await self._join(self._judged(parse_url(text)), scope, hold)
        except (MediaError, ServiceError):
            self._counts["fetch_failures"] += 1
            raise
        if landed.holder is not hold:
            await hold.take(len(landed.data))
        elif hold.size > hold.limit:
            raise request_media_too_large(hold.limit)
        return landed.data

    async def _join(self, url: MediaURL, scope: str, hold: MediaReservation) -> _Landed:
        key = (scope, str(url.url))
        holds = self._holds.setdefault(key, [])
        holds.append(hold)
        try:
            return await self._flights.join(key, partial(self._fly, url, scope, holds))
        finally:
            holds.remove(hold)
            if not holds:
                del self._holds[key]

    async def _fly(self, url: MediaURL, scope: str, holds: Sequence[MediaReservation]) -> _Landed:
        """Its room is the flight's own while it is under way, then that of one who waits."""
        who = scope.partition("\n")[0]
        first = str(url.url)
        kept = self._cache.find(scope, first)
        if kept and self._cache.is_fresh(kept):
            self._counts["fetch_cache_hits"] += 1
            return _Landed(kept.data, None)
        with self._room.hold(who) as own:
            got = await self._get(url, kept, who, own)
            data = kept.data if got.data is None and kept else got.data or b""
            self._counts["fetch_cache_misses" if got.data is not None else "fetch_cache_hits"] += 1
            self._cache.keep(scope, first, data, got.url, got.headers)
            own.pass_on(holds[0])
        return _Landed(data, None if got.data is None else holds[0])

    async def _get(
        self, url: MediaURL, kept: FetchedFile | None, who: str, own: MediaReservation
    ) -> _Got:
        """Within the time that there is."""
        try:
            async with asyncio.timeout(self._seconds), self._fetches.slot(who):
                return await self._follow(url, kept, who, own)
        except TimeoutError:
            if own.waits:
                raise budget_exhausted() from None
            raise MediaFetchTimeout(
                f"The media URL could not be fetched within {self._seconds:g} seconds."
            ) from None

    async def _follow(
        self, url: MediaURL, kept: FetchedFile | None, who: str, own: MediaReservation
    ) -> _Got:
        for _ in range(MAX_REDIRECTS + 1):
            here = str(url.url)
            known = kept if kept and kept.url == here else None
            conditions = known.conditions() if known else {}
            async with self._hosts.slot((who, url.host)):
                answer = await self._client.get(
                    _ask(url, who, conditions, self._limit), partial(self._grow, own)
                )
            if answer.status == 304 and known and conditions:
                return _Got(None, here, _merged(known, answer.headers))
            if answer.status == 200:
                own.keep(len(answer.body))
                self._counts["fetched_files"] += 1
                self._counts["fetched_bytes"] += len(answer.body)
                return _Got(answer.body, here, answer.headers)
            location = answer.headers.get("location")
            if answer.status not in _MOVED or not location:
                raise fetch_failed(f"its server answered with status {answer.status}")
            url = self._judged(resolve_redirect(url, location), after=url)
        raise fetch_failed(f"it is redirected more than {MAX_REDIRECTS} times")

    async def _grow(self, own: MediaReservation, size: int) -> int:
        """Room for so many bytes in all, or more. A body takes it as it comes in: what a server
        says of its length costs it nothing.
        """
        if (short := size - own.size) > 0:
            await own.take(
                max(short, min(RESERVE_STEP, self._limit - own.size, own.limit - own.size))
            )
        return own.size

    def _judged(self, url: MediaURL, after: MediaURL | None = None) -> MediaURL:
        """Refuses what needs no connection to refuse. The gate judges addresses again."""
        if after is not None and after.secure and not url.secure:
            raise url_blocked("it is redirected from https to http")
        if not self._domains.permit(url.host):
            raise url_blocked("media are not fetched from its host here")
        local = url.host == "localhost" or url.host.endswith(".localhost")
        if (local and not self._private) or (url.is_address and not self._client.permits(url.host)):
            raise network_blocked()
        return url

    async def close(self) -> None:
        await self._flights.close()
        await self._client.close()


def _ask(url: MediaURL, tenant: str, conditions: Mapping[str, str], limit: int) -> FetchRequest:
    there = url.url
    name = there.raw_host or ""
    host = f"[{url.host}]" if ":" in url.host else url.host
    port = there.port or 0
    return FetchRequest(
        tenant,
        url.secure,
        name,
        port,
        host if there.is_default_port() else f"{host}:{port}",
        there.raw_path_qs,
        dict(conditions),
        limit,
    )


def _merged(known: FetchedFile, answer: Mapping[str, str]) -> dict[str, str]:
    """The headers of a kept file with what a 304 says anew: it need not repeat the validators."""
    names = ("cache-control", "age", "vary", "etag", "last-modified")
    said = {name: answer[name] for name in names if name in answer}
    return {"etag": known.etag, "last-modified": known.modified} | said
