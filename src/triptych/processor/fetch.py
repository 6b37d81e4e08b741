"""Media from http and https URLs, fetched by one client that trusts neither URL nor server.

Each hop of a redirect is read, judged and connected to as if a client had named it. One deadline
covers names, redirects and body; a body over the limit ends the connection. What a server says
beyond its status number reaches nobody but the decode pool.
"""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import Mapping, Sequence
from functools import partial

import aiohttp
from msgspec import Struct

import triptych
from triptych.config import Config
from triptych.errors import (
    MediaError,
    MediaFetchFailed,
    MediaFetchTimeout,
    MediaTooLarge,
    MediaURLBlocked,
)
from triptych.processor import address
from triptych.processor.address import Gate, Refused
from triptych.processor.fetched import Fetched, FetchedCache
from triptych.processor.held import Hold, Room, no_room, too_many
from triptych.processor.url import Domains, MediaURL, blocked, join, read
from triptych.runtime.flights import Flights
from triptych.runtime.shares import Shares

REDIRECTS = 5
STEP = 1 << 20  # bytes that room is taken for at once
FETCHES = 512  # at once,
FETCHES_OF_ONE = 128  # and of those, for one tenant: slow servers take up their turns alone,
FETCHES_PER_HOST = 16  # and for it, from one host
_MOVED = frozenset({301, 302, 303, 307, 308})
_HEADERS = {
    "User-Agent": f"Triptych/{triptych.__version__}",
    "Accept": "*/*",
    "Accept-Encoding": "identity",  # media are compressed already
}


class _Got(Struct, frozen=True):
    """The answer at the end of the redirects; no data: nothing has changed since it was kept."""

    data: bytes | memoryview | None
    url: str
    headers: Mapping[str, str]


class _Landed(Struct, frozen=True):
    data: bytes | memoryview
    holder: Hold | None  # whose room it has by now; none: it was here before


class Fetcher:
    """All fetches of one frontend: the same URL asked for twice at once in a scope flies once."""

    def __init__(self, config: Config, gate: Gate, room: Room) -> None:
        self._limit = config.limits.media_bytes
        self._seconds = config.limits.fetch_seconds
        self._private = config.allow_private_media
        self._domains = Domains(config.allowed_media_domains)
        self._gate = gate
        self._room = room
        self._cache = FetchedCache(config.cache.fetched)
        self._flights: Flights[_Landed] = Flights()
        self._holds: dict[tuple[str, str], list[Hold]] = {}  # of those who wait for a flight
        self._fetches = Shares(FETCHES, FETCHES_OF_ONE)  # by tenant
        self._hosts = Shares(FETCHES, FETCHES_PER_HOST)  # by tenant and host
        self._session: aiohttp.ClientSession | None = None
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
            "fetch_cache_evictions": self._cache.files.evictions,
            "fetch_cache_bytes": self._cache.files.bytes,
        }
        return self._counts | kept

    async def fetch(self, text: str, scope: str, hold: Hold) -> bytes | memoryview:
        """The file at a URL, from here if the server permits. Cancelled: the others fetch on."""
        try:
            landed = await self._join(self._judged(read(text)), scope, hold)
        except MediaError:
            self._counts["fetch_failures"] += 1
            raise
        if landed.holder is not hold:
            await hold.take(len(landed.data))
        elif hold.size > hold.limit:
            raise too_many(hold.limit)
        return landed.data

    async def _join(self, url: MediaURL, scope: str, hold: Hold) -> _Landed:
        key = (scope, str(url.url))
        holds = self._holds.setdefault(key, [])
        holds.append(hold)
        try:
            return await self._flights.join(key, partial(self._fly, url, scope, holds))
        finally:
            holds.remove(hold)
            if not holds:
                del self._holds[key]

    async def _fly(self, url: MediaURL, scope: str, holds: Sequence[Hold]) -> _Landed:
        """Its room is the flight's own while it is under way, then that of one who waits."""
        who = scope.partition("\n")[0]
        address.tenant.set(who)  # in this flight's own task
        first = str(url.url)
        kept = self._cache.find(scope, first)
        if kept and self._cache.is_fresh(kept):
            self._counts["fetch_cache_hits"] += 1
            return _Landed(kept.data, None)
        with self._room.hold(who) as own:
            got = await self._get(url, kept, own)
            data = kept.data if got.data is None and kept else got.data or b""
            self._counts["fetch_cache_misses" if got.data is not None else "fetch_cache_hits"] += 1
            self._cache.keep(scope, first, data, got.url, got.headers)
            own.pass_on(holds[0])
        return _Landed(data, None if got.data is None else holds[0])

    async def _get(self, url: MediaURL, kept: Fetched | None, own: Hold) -> _Got:
        """Within the time that there is, and with our own words for what went wrong."""
        try:
            async with asyncio.timeout(self._seconds), self._fetches.lent(address.tenant.get()):
                return await self._follow(url, kept, own)
        except TimeoutError:
            if own.waits:
                raise no_room() from None
            raise MediaFetchTimeout(
                f"The media URL could not be fetched within {self._seconds:g} seconds."
            ) from None
        except aiohttp.ClientConnectorError as error:
            if isinstance(error.os_error, Refused):
                raise _refused() from None
            raise _failed("its server could not be reached") from None
        except (aiohttp.ClientError, OSError, ValueError):
            raise _failed("its server broke off, or does not speak HTTP") from None

    async def _follow(self, url: MediaURL, kept: Fetched | None, own: Hold) -> _Got:
        for _ in range(REDIRECTS + 1):
            here = str(url.url)
            known = kept if kept and kept.url == here else None
            headers = known.conditions() if known else {}
            async with (
                self._hosts.lent((address.tenant.get(), url.host)),
                self._client().get(url.url, headers=headers, allow_redirects=False) as answer,
            ):
                if answer.status == 304 and known and headers:
                    return _Got(None, here, _merged(known, answer.headers))
                if answer.status == 200:
                    return _Got(await self._body(answer, own), here, answer.headers.copy())
                location = answer.headers.get("Location")
                if answer.status not in _MOVED or not location:
                    raise _failed(f"its server answered with status {answer.status}")
                answer.close()  # unread: what a redirect says besides is of no interest
            url = self._judged(join(url, location), after=url)
        raise _failed(f"it is redirected more than {REDIRECTS} times")

    def _judged(self, url: MediaURL, after: MediaURL | None = None) -> MediaURL:
        """Refuses what needs no connection to refuse. The gate judges addresses again."""
        if after is not None and after.secure and not url.secure:
            raise blocked("it is redirected from https to http")
        if not self._domains.permit(url.host):
            raise blocked("media are not fetched from its host here")
        local = url.host == "localhost" or url.host.endswith(".localhost")
        if (local and not self._private) or (url.is_address and not self._gate.permits(url.host)):
            raise _refused()
        return url

    async def _body(self, answer: aiohttp.ClientResponse, own: Hold) -> bytes | memoryview:
        """The body, which is never more than the limit, unpacked or packed.

        Room is taken as it comes in: what a server says of its length costs it nothing.
        """
        if (answer.content_length or 0) > self._limit:
            raise self._too_large()
        data = bytearray()  # grows in place: joining pieces in the end would hold up the loop
        async for piece in answer.content.iter_any():
            if len(data) + len(piece) > self._limit:
                raise self._too_large()
            if (short := len(data) + len(piece) - own.size) > 0:
                await own.take(max(short, min(STEP, self._limit - own.size, own.limit - own.size)))
            data += piece
        own.keep(len(data))
        self._counts["fetched_files"] += 1
        self._counts["fetched_bytes"] += len(data)
        packing = answer.headers.get("Content-Encoding", "identity").strip().lower()
        if packing in ("", "identity"):
            return memoryview(data).toreadonly()
        if packing not in ("gzip", "x-gzip", "deflate"):
            raise _failed("its server packed it in a way that was not asked for")
        await own.take(self._limit)
        unpacked = await asyncio.to_thread(_unpacked, data, self._limit)
        if unpacked is None:
            raise self._too_large()
        own.keep(len(unpacked))
        return unpacked

    def _client(self) -> aiohttp.ClientSession:
        if self._session is None:
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(
                    resolver=self._gate,
                    socket_factory=self._gate.open,
                    use_dns_cache=False,
                    limit=FETCHES,
                ),
                cookie_jar=aiohttp.DummyCookieJar(),
                headers=_HEADERS,
                timeout=aiohttp.ClientTimeout(total=None, sock_connect=None),  # ours covers all
                auto_decompress=False,
                trust_env=False,
            )
        return self._session

    def _too_large(self) -> MediaTooLarge:
        return MediaTooLarge(
            f"The file at the media URL has over {self._limit} bytes, the most that is fetched."
        )

    async def close(self) -> None:
        await self._flights.close()
        if self._session is not None:
            await self._session.close()
        await self._gate.close()


def _failed(why: str) -> MediaFetchFailed:
    return MediaFetchFailed(f"The media URL could not be fetched: {why}.")


def _refused() -> MediaURLBlocked:
    return blocked(
        "its host is in a network that is closed to media. A server that was started with "
        "--allow-private-media reaches private and loopback addresses, never link-local ones"
    )


def _merged(known: Fetched, answer: Mapping[str, str]) -> dict[str, str]:
    """The headers of a kept file with what a 304 says anew: it need not repeat the validators."""
    names = ("Cache-Control", "Age", "Vary", "ETag", "Last-Modified")
    said = {name: answer[name] for name in names if name in answer}
    return {"ETag": known.etag, "Last-Modified": known.modified} | said


def _unpacked(data: bytes | bytearray, limit: int) -> bytes | None:
    """What gzip or deflate packed; None if that is over the limit. No more is ever unpacked."""
    raw = not data.startswith((b"\x1f", b"\x78"))  # some servers send deflate without its frame
    unpacker = zlib.decompressobj(-zlib.MAX_WBITS if raw else zlib.MAX_WBITS | 32)
    try:
        unpacked = unpacker.decompress(data, limit + 1)
    except zlib.error:
        raise _failed("its server packed it wrongly") from None
    if len(unpacked) > limit:
        return None
    if not unpacker.eof:
        raise _failed("its server broke off")
    return unpacked
