"""Media that clients upload ahead of requests: kept in memory for a while, under a secret handle.

Handles belong to a tenant (an API key): another tenant's handle is unknown. Bytes are bounded, per
tenant and in all, and uploads expire. The content is not examined: decode pools do that.
"""

from __future__ import annotations

import secrets
import time
from collections import Counter
from collections.abc import Callable

from msgspec import Struct

from triptych.errors import MediaDisabled, MediaNotFound, MediaTooLarge, Overloaded

UPLOAD_SCHEME = "media://"
UPLOAD_OVERHEAD = 512  # bytes that an upload counts for besides its content


class Upload(Struct, frozen=True):
    """What its owner learns of an upload."""

    id: str  # a URL, for later requests
    size: int
    expires: float  # seconds since 1970, by the wall clock


class _StoredUpload(Struct, frozen=True):
    tenant: str
    data: bytes
    until: float  # by the monotonic clock


class UploadStore:
    """All uploads of one frontend, oldest first. A full store refuses new ones, and evicts none.

    ``limit_bytes`` bounds all together, ``share`` those of one tenant (default: as all).
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
        if self._held[tenant] + cost > self._share or self.held + cost > self._limit:
            raise Overloaded(
                "There is no memory for uploads now. Delete those that are no longer needed, "
                "or try again later."
            )
        id = UPLOAD_SCHEME + secrets.token_hex(16)
        self._uploads[id] = _StoredUpload(tenant, data, self._clock() + self._seconds)
        self._held[tenant] += cost
        return Upload(id, len(data), time.time() + self._seconds)

    def get(self, tenant: str, id: str) -> bytes:
        self._forget_expired()
        upload = self._uploads.get(id)
        if upload is None or upload.tenant != tenant:
            raise MediaNotFound(
                "There is no such upload, or it has expired. Upload the media anew."
            )
        return upload.data

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

    def __len__(self) -> int:
        self._forget_expired()
        return len(self._uploads)
