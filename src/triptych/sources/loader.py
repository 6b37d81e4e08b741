"""Where media come from: the one door through which they enter, whatever a request names.

Bytes pass as they are; URLs are fetched (http, https), read (file:) or looked up (media://). What
comes out is as the source had it: nothing here decodes. One promise is made about it: bytes of an
embedding that look like a torch file come from a file that the operator permitted, never from a
client or the network.
"""

from __future__ import annotations

import re

from triptych.config import Config
from triptych.errors import InvalidEmbedding, UnsupportedURLScheme
from triptych.messages import MediaForm, MediaKind
from triptych.sources.budget import MediaBudget, MediaReservation
from triptych.sources.fetch import Fetcher
from triptych.sources.fetch_process import FetchProcess
from triptych.sources.files import MediaFolder
from triptych.sources.http_client import FetchClient
from triptych.sources.uploads import UploadStore

_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]{0,31}):")
_TORCH_SUFFIXES = (b".pt", b".pth", b".bin")


class MediaLoader:
    """All media of one frontend. ``scope`` is the tenant, a line feed and the client's salt."""

    def __init__(
        self, config: Config, uploads: UploadStore, *, client: FetchClient | None = None
    ) -> None:
        """``client``: what fetches; none given: a process of its own."""
        self._limits = config.limits
        self._torch = config.allow_torch_embeddings
        self._uploads = uploads
        self._folder = MediaFolder(config.allowed_media_path)
        self._room = MediaBudget(config)
        self._client = client or FetchProcess(
            private=config.allow_private_media, media_bytes=config.limits.media_bytes
        )
        self._fetcher = Fetcher(config, self._client, self._room)

    def start(self) -> None:
        """Start the process that fetches, so that no request waits for it."""
        self._client.start()

    @property
    def counters(self) -> dict[str, float]:
        """``fetched_files``, ``fetched_bytes``, ``fetch_failures``, ``fetch_cache_...``, and
        ``loaded_...``: what requests hold.
        """
        return self._fetcher.counters | self._room.counters

    def hold(self, scope: str) -> MediaReservation:
        """Room for what a request loads, to be held until the request ends."""
        return self._room.hold(_tenant(scope))

    async def load(
        self,
        source: bytes | memoryview | str,
        kind: MediaKind,
        form: MediaForm,
        scope: str,
        hold: MediaReservation,
    ) -> bytes | memoryview:
        """The bytes of a source, held; those that came with the request are held already.

        Raises a MediaError, MediaNotFound for an unknown upload, or Overloaded.
        """
        if not isinstance(source, str):
            return _checked(source, kind, form)
        scheme = _SCHEME.match(source)
        match scheme[1].lower() if scheme else "":
            case "http" | "https":
                return _checked(await self._fetcher.fetch(source, scope, hold), kind, form)
            case "file":
                return await self._read(source, kind, form, _tenant(scope), hold)
            case "media":
                data = _checked(self._uploads.get(_tenant(scope), source), kind, form)
                await hold.take(len(data))
                return data
        raise UnsupportedURLScheme(
            "Media URLs are http:, https:, data:, file: (below the permitted folder) or media: "
            "(what an upload gave)."
        )

    async def _read(
        self, url: str, kind: MediaKind, form: MediaForm, tenant: str, hold: MediaReservation
    ) -> bytes | memoryview:
        path = self._folder.find(url)
        torch = form == "embeds" and path[-1].lower().endswith(_TORCH_SUFFIXES)
        if torch and not self._torch:
            raise InvalidEmbedding(
                "Torch files are read only by a server that was started with "
                "--allow-torch-embeddings. `triptych convert-embeddings` makes safetensors of them."
            )
        if form == "embeds" and not torch and not path[-1].lower().endswith(b".safetensors"):
            raise InvalidEmbedding("Embeddings are read from .safetensors files.")
        limit, seconds = self._limits.media_bytes, self._limits.fetch_seconds
        size = await self._folder.size(path, limit, seconds, tenant)
        await hold.take(size)
        data = await self._folder.read(path, limit, seconds, tenant)
        if len(data) > size:  # it has grown meanwhile
            await hold.take(len(data) - size)
        return data if torch else _checked(data, kind, form)

    async def close(self) -> None:
        """Ends what is under way and gives back every connection and descriptor."""
        self._folder.close()
        await self._fetcher.close()


def _tenant(scope: str) -> str:
    return scope.partition("\n")[0]


def _checked(data: bytes | memoryview, kind: MediaKind, form: MediaForm) -> bytes | memoryview:
    """Refuses embeddings that can be no safetensors: torch files from where none may come.

    A decode pool takes for torch only what this refuses.
    """
    if form == "embeds" and bytes(data[8:9]) != b"{":  # a length, then the header: JSON
        raise InvalidEmbedding(
            f"The {kind} embedding is no safetensors file. `triptych convert-embeddings` makes "
            "one of a torch file."
        )
    return data
