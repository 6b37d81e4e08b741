"""Loads the media that a request names: the one way by which their bytes enter.

Bytes in the request pass as they are; URLs are fetched (http:, https:), read (file:) or looked up
(media:). Nothing here decodes. One promise holds for the result: bytes of an embedding that look
like a torch file come from a file that the operator permitted, never from a client or the network.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Collection, Hashable, Sequence
from contextlib import asynccontextmanager

from triptych.config import Config
from triptych.errors import InvalidEmbedding, RequestError, UnsupportedURLScheme
from triptych.messages import MediaForm, MediaItem, MediaKind
from triptych.prompt.processor import MediaPart, MediaSource, PlacedMedia
from triptych.sources.budget import MediaBudget, MediaReservation, request_media_too_large
from triptych.sources.fetch import Fetcher
from triptych.sources.fetch_process import FetchProcess
from triptych.sources.files import MediaFolder
from triptych.sources.uploads import UploadStore

MAX_PARALLEL_LOADS = 8  # of one request
_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]{0,31}):")
_TORCH_SUFFIXES = (b".pt", b".pth", b".bin")


@asynccontextmanager
async def load_items(
    media: Sequence[PlacedMedia], sources: MediaLoader, scope: str
) -> AsyncIterator[tuple[MediaItem, ...]]:
    """The media of a prompt as MediaItems, in its order; their memory is reserved in the scope.

    If one cannot be loaded, all fail. ``scope``: the tenant and its salt, whose uploads and cached
    files may be used.
    """
    with sources.reserve(scope) as reservation:
        yield await _load_items(media, sources, scope, reservation)


async def _load_items(
    media: Sequence[PlacedMedia], sources: MediaLoader, scope: str, reservation: MediaReservation
) -> tuple[MediaItem, ...]:
    """A source that is named several times is loaded once, but counted each time it is sent."""
    unique: dict[Hashable, PlacedMedia] = {}
    for placed in media:
        unique.setdefault(_identity(placed), placed)
    data = await _load_all(unique.values(), sources, scope, reservation)
    loaded = dict(zip(unique, data, strict=True))
    items, total = [], 0
    for placed in media:
        content = loaded[_identity(placed)]
        total += len(content)
        if total > reservation.limit:
            raise request_media_too_large(reservation.limit, placed.place)
        part = placed.part
        items.append(MediaItem(part.kind, placed.at, content, part.form, None, part.options))
    return tuple(items)


async def _load_all(
    media: Collection[PlacedMedia],
    sources: MediaLoader,
    scope: str,
    reservation: MediaReservation,
) -> Sequence[bytes | memoryview]:
    """The bytes of each, a few at a time. When one fails, the others end before it is raised."""
    limit = asyncio.Semaphore(MAX_PARALLEL_LOADS)

    async def load(placed: PlacedMedia) -> bytes | memoryview:
        part = placed.part
        async with limit:
            try:
                if part.uuid is not None:
                    return await _load_named(part, part.uuid, sources, scope, reservation)
                assert part.source is not None, "without a uuid there is a source"
                return await sources.load(part.source, part.kind, part.form, scope, reservation)
            except RequestError as error:
                error.param = placed.place
                raise

    if len(media) == 1:
        return [await load(placed) for placed in media]
    tasks = [asyncio.ensure_future(load(placed)) for placed in media]
    try:
        return await asyncio.gather(*tasks)
    finally:
        await _cancel_all(tasks)
        tasks.clear()  # an error refers to this frame, and its task to it: break the cycle


async def _load_named(
    part: MediaPart, uuid: str, sources: MediaLoader, scope: str, reservation: MediaReservation
) -> bytes | memoryview:
    """The bytes of a part with a uuid, kept for later parts that have the uuid alone.

    Content that is sent always wins over what is stored.
    """
    tenant, name = _tenant(scope), f"{part.kind} {part.form} {uuid}"
    if part.source is not None:
        data = await sources.load(part.source, part.kind, part.form, scope, reservation)
        sources.uploads.remember(tenant, name, data)
        return data
    data = _check_embedding(sources.uploads.recall(tenant, name), part.kind, part.form)
    await reservation.add(len(data))
    return data


async def _cancel_all(tasks: Sequence[asyncio.Task[bytes | memoryview]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def _identity(placed: PlacedMedia) -> Hashable:
    """Equal for equal sources: the text of a URL, or the same bytes object."""
    part = placed.part
    source = part.source if isinstance(part.source, str) else id(part.source)
    return source, part.kind, part.form, part.uuid


class MediaLoader:
    """All media of one frontend. ``scope`` is the tenant, a line feed and the client's salt."""

    def __init__(
        self, config: Config, uploads: UploadStore, *, client: FetchProcess | None = None
    ) -> None:
        """``client``: fetches URLs; by default a FetchProcess."""
        self._limits = config.limits
        self._allow_torch = config.allow_torch_embeddings
        self.uploads = uploads
        self._folder = MediaFolder(config.allowed_media_path)
        self._budget = MediaBudget(config)
        self._client = client or FetchProcess(
            private=config.allow_private_media, media_bytes=config.limits.media_bytes
        )
        self._fetcher = Fetcher(config, self._client, self._budget)

    def start(self) -> None:
        """Start the fetching process, so that no request waits for it."""
        self._client.start()

    @property
    def counters(self) -> dict[str, float]:
        return self._fetcher.counters | self._budget.counters

    def reserve(self, scope: str) -> MediaReservation:
        """A reservation for what a request loads, to be held until the request ends."""
        return self._budget.reserve(_tenant(scope))

    async def load(
        self,
        source: MediaSource,
        kind: MediaKind,
        form: MediaForm,
        scope: str,
        reservation: MediaReservation,
    ) -> bytes | memoryview:
        """The bytes of a source. Those that came with the request need no reservation.

        Raises a MediaError, MediaNotFound for an unknown upload, or Overloaded.
        """
        if not isinstance(source, str):
            return _check_embedding(source, kind, form)
        scheme = _SCHEME.match(source)
        match scheme[1].lower() if scheme else "":
            case "http" | "https":
                data = await self._fetcher.fetch(source, scope, reservation)
                return _check_embedding(data, kind, form)
            case "file":
                return await self._read_file(source, kind, form, _tenant(scope), reservation)
            case "media":
                data = _check_embedding(self.uploads.get(_tenant(scope), source), kind, form)
                await reservation.add(len(data))
                return data
        raise UnsupportedURLScheme(
            "Media URLs are http:, https:, data:, file: (below the permitted folder) or media: "
            "(what an upload gave)."
        )

    async def _read_file(
        self,
        url: str,
        kind: MediaKind,
        form: MediaForm,
        tenant: str,
        reservation: MediaReservation,
    ) -> bytes | memoryview:
        path = self._folder.find(url)
        torch = form == "embeds" and path[-1].lower().endswith(_TORCH_SUFFIXES)
        if torch and not self._allow_torch:
            raise InvalidEmbedding(
                "Torch files are read only by a server that was started with "
                "--allow-torch-embeddings. `triptych convert-embeddings` makes safetensors of them."
            )
        if form == "embeds" and not torch and not path[-1].lower().endswith(b".safetensors"):
            raise InvalidEmbedding("Embeddings are read from .safetensors files.")
        limit, seconds = self._limits.media_bytes, self._limits.fetch_seconds
        size = await self._folder.size(path, limit, seconds, tenant)
        await reservation.add(size)
        data = await self._folder.read(path, limit, seconds, tenant)
        if len(data) > size:  # it has grown meanwhile
            await reservation.add(len(data) - size)
        return data if torch else _check_embedding(data, kind, form)

    async def close(self) -> None:
        """End what is running, and close every connection and descriptor."""
        self._folder.close()
        await self._fetcher.close()


def _tenant(scope: str) -> str:
    return scope.partition("\n")[0]


def _check_embedding(
    data: bytes | memoryview, kind: MediaKind, form: MediaForm
) -> bytes | memoryview:
    """Refuse embeddings that cannot be safetensors: torch files from where none are permitted.

    The decode pool treats as torch files exactly the data that this function refuses.
    """
    if form == "embeds" and bytes(data[8:9]) != b"{":  # a length, then the header: JSON
        raise InvalidEmbedding(
            f"The {kind} embedding is not a safetensors file. `triptych convert-embeddings` makes "
            "one of a torch file."
        )
    return data
