"""Fetches media from http: and https: URLs, trusting neither the URL nor the server.

Every hop of a redirect is checked as if a client had named it. One deadline covers name look-up,
redirects and body. A FetchProcess talks to the servers: here arrive a status, a few headers and a
body in memory. Files are cached per scope (tenant and salt), as the server's headers permit.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial

from msgspec import Struct

from triptych.config import Config
from triptych.errors import MediaError, MediaFetchTimeout, ServiceError
from triptych.runtime.caching import LRUCache, SingleFlight
from triptych.runtime.concurrency import FairSemaphore
from triptych.sources.budget import (
    MediaBudget,
    MediaReservation,
    budget_exhausted,
    request_media_too_large,
)
from triptych.sources.fetch_channel import FetchRequest, fetch_failed
from triptych.sources.fetch_process import FetchProcess
from triptych.sources.url import (
    AllowedDomains,
    ParsedURL,
    network_blocked,
    parse_url,
    resolve_redirect,
    url_blocked,
)

MAX_REDIRECTS = 5
RESERVE_STEP = 1 << 20  # bytes that are reserved at once
MAX_FETCHES = 512  # at once,
MAX_FETCHES_PER_TENANT = 128  # for one tenant, so that its slow servers delay only its own fetches,
MAX_FETCHES_PER_HOST = 16  # and for one tenant from one host
MAX_FRESH_SECONDS = 300.0
ENTRY_OVERHEAD = 1024  # bytes that a cached file counts for besides its content, URLs and headers
_REDIRECTS = frozenset({301, 302, 303, 307, 308})
_VALIDATOR = re.compile(r"[ -~]{0,1024}")  # can be sent back as it came
_SECONDS = re.compile(r'"?([0-9]{1,10})"?')


class _Response(Struct, frozen=True):
    """The response at the end of the redirects; no data: the cached file has not changed."""

    data: bytes | memoryview | None
    url: str
    headers: Mapping[str, str]


class _Result(Struct, frozen=True):
    data: bytes | memoryview
    reservation: MediaReservation | None  # that counts it already; None: it was cached


class Fetcher:
    """All fetches of one frontend. Concurrent requests for a URL in one scope share one fetch."""

    def __init__(self, config: Config, client: FetchProcess, budget: MediaBudget) -> None:
        self._limit = config.limits.media_bytes
        self._seconds = config.limits.fetch_seconds
        self._private = config.allow_private_media
        self._domains = AllowedDomains(config.allowed_media_domains)
        self._client = client
        self._budget = budget
        self._cache = FetchCache(config.cache.fetched)
        self._flights: SingleFlight[_Result] = SingleFlight()
        self._waiting: dict[tuple[str, str], list[MediaReservation]] = {}  # of those who share one
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
        return self._counts | {
            "fetch_process_losses": self._client.losses,
            "fetch_cache_evictions": self._cache.files.evictions,
            "fetch_cache_bytes": self._cache.files.bytes,
        }

    async def fetch(
        self, text: str, scope: str, reservation: MediaReservation
    ) -> bytes | memoryview:
        """The file at a URL, from the cache if its server permits.

        Cancelling ends the fetch only if no other request waits for it.
        """
        try:
            result = await self._join(self._check(parse_url(text)), scope, reservation)
        except (MediaError, ServiceError):
            self._counts["fetch_failures"] += 1
            raise
        if result.reservation is not reservation:
            await reservation.add(len(result.data))
        elif reservation.size > reservation.limit:
            raise request_media_too_large(reservation.limit)
        return result.data

    async def _join(self, url: ParsedURL, scope: str, reservation: MediaReservation) -> _Result:
        key = (scope, str(url.url))
        waiting = self._waiting.setdefault(key, [])
        waiting.append(reservation)
        try:
            return await self._flights.join(key, partial(self._fetch, url, scope, waiting))
        finally:
            waiting.remove(reservation)
            if not waiting:
                del self._waiting[key]

    async def _fetch(
        self, url: ParsedURL, scope: str, waiting: Sequence[MediaReservation]
    ) -> _Result:
        """Its bytes are its own reservation until it is done, then that of one who waits."""
        tenant = scope.partition("\n")[0]
        first = str(url.url)
        cached = self._cache.find(scope, first)
        if cached and self._cache.is_fresh(cached):
            self._counts["fetch_cache_hits"] += 1
            return _Result(cached.data, None)
        with self._budget.reserve(tenant) as own:
            response = await self._get(url, cached, tenant, own)
            changed = response.data is not None
            data = cached.data if cached and not changed else response.data or b""
            self._counts["fetch_cache_misses" if changed else "fetch_cache_hits"] += 1
            self._cache.keep(scope, first, data, response.url, response.headers)
            own.transfer_to(waiting[0])
        return _Result(data, waiting[0] if changed else None)

    async def _get(
        self, url: ParsedURL, cached: FetchedFile | None, tenant: str, own: MediaReservation
    ) -> _Response:
        """Within the deadline."""
        try:
            async with asyncio.timeout(self._seconds), self._fetches.slot(tenant):
                return await self._follow(url, cached, tenant, own)
        except TimeoutError:
            if own.waiting:
                raise budget_exhausted() from None
            raise MediaFetchTimeout(
                f"The media URL could not be fetched within {self._seconds:g} seconds."
            ) from None

    async def _follow(
        self, url: ParsedURL, cached: FetchedFile | None, tenant: str, own: MediaReservation
    ) -> _Response:
        for _ in range(MAX_REDIRECTS + 1):
            here = str(url.url)
            known = cached if cached and cached.url == here else None
            conditions = known.conditions() if known else {}
            async with self._hosts.slot((tenant, url.host)):
                response = await self._client.get(
                    _request(url, tenant, conditions, self._limit), partial(self._reserve, own)
                )
            if response.status == 304 and known and conditions:
                return _Response(None, here, _merge_headers(known, response.headers))
            if response.status == 200:
                own.shrink_to(len(response.body))
                self._counts["fetched_files"] += 1
                self._counts["fetched_bytes"] += len(response.body)
                return _Response(response.body, here, response.headers)
            location = response.headers.get("location")
            if response.status not in _REDIRECTS or not location:
                raise fetch_failed(f"its server answered with status {response.status}")
            url = self._check(resolve_redirect(url, location), after=url)
        raise fetch_failed(f"it is redirected more than {MAX_REDIRECTS} times")

    async def _reserve(self, own: MediaReservation, size: int) -> int:
        """Reserve so many bytes in all, or more. A body reserves as it arrives: a declared length
        alone reserves nothing."""
        if (short := size - own.size) > 0:
            step = min(RESERVE_STEP, self._limit - own.size, own.limit - own.size)
            await own.add(max(short, step))
        return own.size

    def _check(self, url: ParsedURL, after: ParsedURL | None = None) -> ParsedURL:
        """Refuse what can be refused without a connection. AddressFilter checks addresses again."""
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


def _request(
    url: ParsedURL, tenant: str, conditions: Mapping[str, str], limit: int
) -> FetchRequest:
    target = url.url
    host = f"[{url.host}]" if ":" in url.host else url.host
    port = target.port or 0
    return FetchRequest(
        tenant,
        url.secure,
        target.raw_host or "",
        port,
        host if target.is_default_port() else f"{host}:{port}",
        target.raw_path_qs,
        dict(conditions),
        limit,
    )


def _merge_headers(known: FetchedFile, headers: Mapping[str, str]) -> dict[str, str]:
    """The headers of a cached file, updated by a 304, which need not repeat the validators."""
    names = ("cache-control", "age", "vary", "etag", "last-modified")
    sent = {name: headers[name] for name in names if name in headers}
    return {"etag": known.etag, "last-modified": known.modified} | sent


class FetchedFile(Struct, frozen=True):
    """A cached file, and what is needed to ask whether it has changed."""

    data: bytes | memoryview
    url: str  # that gave it, after redirects: its validators are valid only there
    etag: str = ""
    modified: str = ""
    fresh_until: float = 0.0  # by the cache's clock

    def conditions(self) -> dict[str, str]:
        """The headers that ask for the file only if it has changed."""
        if self.etag:
            return {"If-None-Match": self.etag}
        return {"If-Modified-Since": self.modified} if self.modified else {}


class FetchCache:
    """Fetched files by scope and URL; the least recently used are evicted. Scopes share nothing.

    ``Cache-Control`` says whether a file may be cached and how long it is fresh, five minutes at
    most. After that the server must confirm by its validators that the file has not changed.
    """

    def __init__(self, limit_bytes: int, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self.files: LRUCache[tuple[str, str], FetchedFile] = LRUCache(limit_bytes)

    def find(self, scope: str, url: str) -> FetchedFile | None:
        """A cached file, fresh or not."""
        return self.files.get((scope, url))

    def is_fresh(self, file: FetchedFile) -> bool:
        return self._clock() < file.fresh_until

    def keep(
        self, scope: str, url: str, data: bytes | memoryview, final: str, headers: Mapping[str, str]
    ) -> None:
        """Cache a file that ``url`` led to, if the headers of ``final`` permit."""
        self.files.remove((scope, url))
        rules = _cache_control(headers.get("cache-control", ""))
        etag, modified = headers.get("etag", ""), headers.get("last-modified", "")
        if not all(_VALIDATOR.fullmatch(text) for text in (etag, modified)):
            return
        # The headers do not say how long a redirect holds: after one, always ask the server.
        fresh = _fresh_seconds(rules, headers.get("age", "")) if url == final else 0.0
        if "no-store" in rules or "*" in headers.get("vary", ""):
            return
        if not (etag or modified or fresh):
            return  # it could never be used
        file = FetchedFile(data, final, etag, modified, self._clock() + fresh)
        # A hostile server makes these long.
        texts = 4 * len(scope) + len(url) + len(final) + len(etag) + len(modified)
        self.files.put((scope, url), file, len(data) + texts + ENTRY_OVERHEAD)


def _cache_control(text: str) -> dict[str, str]:
    pairs = (word.partition("=") for word in text.lower().split(","))
    return {name.strip(): value.strip() for name, _, value in pairs}


def _fresh_seconds(rules: Mapping[str, str], age: str) -> float:
    max_age = _SECONDS.fullmatch(rules.get("max-age", ""))
    if max_age is None or "no-cache" in rules:
        return 0.0
    passed = _SECONDS.fullmatch(age.strip())
    return max(0.0, min(MAX_FRESH_SECONDS, float(max_age[1]) - (float(passed[1]) if passed else 0)))
