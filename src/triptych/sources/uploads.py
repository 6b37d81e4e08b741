"""Media of clients that are kept in memory for later requests: uploads, and media with a uuid.

An upload has a secret handle, and stays until it expires. Media that came in a request with a uuid
are a cache: they give way to uploads and to newer ones. Both belong to a tenant (an API key): what
another tenant has is unknown. Bytes are bounded, per tenant and in all together. The content is not
examined: decode pools do that.
"""

from __future__ import annotations

import secrets
import time
from collections import Counter
from collections.abc import Callable

from msgspec import Struct

from triptych.errors import (
    MediaDisabled,
    MediaNotFound,
    MediaTooLarge,
    Overloaded,
    UnknownMediaUUID,
)

UPLOAD_SCHEME = "media://"
UPLOAD_OVERHEAD = 512  # bytes that an upload counts for besides its content
MAX_NAMED = 4096  # media with a uuid, of all tenants: to find one to drop takes a look at each


class Upload(Struct, frozen=True):
    """What its owner learns of an upload."""

    id: str  # a URL, for later requests
    size: int
    expires: float  # seconds since 1970, by the wall clock


class _StoredUpload(Struct, frozen=True):
    tenant: str
    data: bytes | memoryview
    until: float  # by the monotonic clock


_MediaUUID = tuple[str, str]  # the tenant, and what it calls the media


class UploadStore:
    """All uploads of one frontend, oldest first. A full store refuses new ones, and evicts none.

    Media with a uuid use what uploads leave, the least recently used first to go. ``limit_bytes``
    bounds all together, ``share`` those of one tenant (default: as all).
    """

    def __init__(
        self,
        limit_bytes: int,
        seconds: float,
        *,
        share: int | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._held: Counter[str] = Counter()  # bytes by tenant
        self._limit = limit_bytes
        self._share = limit_bytes if share is None else min(share, limit_bytes)
        self._seconds = seconds
        self._clock = clock
        self._uploads: dict[str, _StoredUpload] = {}
        self._named: dict[_MediaUUID, _StoredUpload] = {}  # the latest used last

    @property
    def held(self) -> int:
        """Bytes, of all tenants."""
        return self._held.total()

    def put(self, tenant: str, data: bytes) -> Upload:
        """Raises MediaDisabled, MediaTooLarge (can never fit), or Overloaded (does not now)."""
        cost = len(data) + UPLOAD_OVERHEAD
        if not self._limit:
            raise MediaDisabled("Uploads are switched off here. Send the media in the request.")
        if cost > self._share:
            raise MediaTooLarge(
                f"The upload has {len(data)} bytes, more than all your uploads may have here."
            )
        self._forget_expired()
        if not self._make_room(tenant, cost):
            raise Overloaded(
                "There is no memory for uploads now. Delete those that are no longer needed, "
                "or try again later."
            )
        id = UPLOAD_SCHEME + secrets.token_hex(16)
        self._uploads[id] = _StoredUpload(tenant, data, self._clock() + self._seconds)
        self._held[tenant] += cost
        return Upload(id, len(data), time.time() + self._seconds)

    def get(self, tenant: str, id: str) -> bytes | memoryview:
        self._forget_expired()
        upload = self._uploads.get(id)
        if upload is None or upload.tenant != tenant:
            raise MediaNotFound(
                "There is no such upload, or it has expired. Upload the media anew."
            )
        return upload.data

    def remember(self, tenant: str, uuid: str, data: bytes | memoryview) -> None:
        """Keep media under the tenant's uuid, in place of what it had, if there is room."""
        name = (tenant, uuid)
        if name in self._named:
            self._remove_named(name)
        self._forget_expired()
        cost = len(data) + UPLOAD_OVERHEAD
        while len(self._named) >= MAX_NAMED:
            self._remove_named(next(iter(self._named)))
        if cost <= self._share and self._make_room(tenant, cost):
            self._named[name] = _StoredUpload(tenant, data, self._clock() + self._seconds)
            self._held[tenant] += cost

    def recall(self, tenant: str, uuid: str) -> bytes | memoryview:
        """What the tenant last sent under this uuid. Raises UnknownMediaUUID."""
        stored = self._named.pop((tenant, uuid), None)
        if stored is not None:
            self._named[tenant, uuid] = stored  # the latest used
            if stored.until > self._clock():
                return stored.data
            self._remove_named((tenant, uuid))
        raise UnknownMediaUUID(
            "Nothing is stored under this uuid, or no longer. Send the media beside it."
        )

    def _make_room(self, tenant: str, cost: int) -> bool:
        """Drop media with a uuid until so many bytes fit; False: uploads leave no room."""
        while self._held[tenant] + cost > self._share:
            own = next((name for name in self._named if name[0] == tenant), None)
            if own is None:
                return False
            self._remove_named(own)
        while self.held + cost > self._limit:
            if not self._named:
                return False
            self._remove_named(next(iter(self._named)))
        return True

    def drop(self, tenant: str, id: str) -> None:
        self.get(tenant, id)
        self._remove(id)

    def _forget_expired(self) -> None:
        now = self._clock()
        while self._uploads:  # all live equally long: the oldest expires first
            oldest = next(iter(self._uploads))
            if self._uploads[oldest].until > now:
                return
            self._remove(oldest)

    def _remove(self, id: str) -> None:
        upload = self._uploads.pop(id)
        self._held[upload.tenant] -= len(upload.data) + UPLOAD_OVERHEAD

    def _remove_named(self, name: _MediaUUID) -> None:
        stored = self._named.pop(name)
        self._held[stored.tenant] -= len(stored.data) + UPLOAD_OVERHEAD

    def __len__(self) -> int:
        self._forget_expired()
        return len(self._uploads)
