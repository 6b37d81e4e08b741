"""What media items become in an expanded prompt, learned from workers' answers.

A frontend has files and one placeholder for each. Workers report with their answers which media key
a file has and which tokens replaced its placeholder; so the frontend can hash the next prompt with
that file before it sends it. An unknown item is cached nowhere either. Items are found by
``sample_digest`` where a mistake costs a cache hit, and compared by all of their bytes
(``content_digests``) where the bytes will not be sent and a mistake would show another picture.
"""

from __future__ import annotations

import asyncio
import hashlib
from array import array
from collections.abc import Iterable, Sequence

from msgspec import Struct

from triptych.messages import MediaItem, MediaMeta, MediaSpan
from triptych.pipeline.router import sample_digest

MAX_ITEMS = 16384
MAX_IDS = 4 << 20  # token ids that are kept, of all items
INLINE_BYTES = 256 << 10  # that are hashed on the event loop


class MediaLayout(Struct, frozen=True):
    """The tokens that replace an item's placeholder in an expanded prompt."""

    key: bytes
    length: int
    ids: array[int] | None = None  # None: the placeholder, ``length`` times
    meta: MediaMeta | None = None  # what a worker needs to lay it out without an encoder
    digest: bytes = b""  # of the bytes that ``meta`` belongs to; empty: unknown

    def tokens(self, placeholder: int) -> Sequence[int]:
        return (placeholder,) * self.length if self.ids is None else self.ids


class MediaLayoutCache:
    """An LRU cache, bounded in items and in token ids."""

    def __init__(self, max_items: int = MAX_ITEMS, max_ids: int = MAX_IDS) -> None:
        self._max_items = max_items
        self._max_ids = max_ids
        self._layouts: dict[bytes, MediaLayout] = {}  # by sample digest, the latest used last
        self._ids = 0

    def __len__(self) -> int:
        return len(self._layouts)

    def find(self, item: MediaItem) -> MediaLayout | None:
        digest = sample_digest(item)
        layout = self._layouts.pop(digest, None)
        if layout is not None:
            self._layouts[digest] = layout
        elif item.prepared is not None:
            meta = item.prepared.meta
            return MediaLayout(meta.key, meta.tokens, None, meta, _content_digest(item))
        return layout

    def add_spans(self, items: Iterable[MediaItem], spans: Iterable[MediaSpan]) -> None:
        """Items as a worker has laid them out in a prompt. No spans: the engine reports none."""
        for item, span in zip(items, spans, strict=False):
            digest = sample_digest(item)
            known = self._layouts.get(digest)
            same = known is not None and known.key == span.key
            meta, content = (known.meta, known.digest) if known and same else (None, b"")
            ids = array("q", span.ids) if span.ids else None
            self._keep(digest, MediaLayout(span.key, span.length, ids, meta, content))

    def add_meta(self, item: MediaItem, meta: MediaMeta, content: bytes = b"") -> None:
        """An item as an encoder reports it, before the prompt. ``content``: digest of its bytes."""
        digest = sample_digest(item)
        known = self._layouts.get(digest)
        if known is None or known.key != meta.key:
            self._keep(digest, MediaLayout(meta.key, meta.tokens, None, meta, content))
        elif known.meta is None or known.digest != content:
            self._keep(digest, MediaLayout(known.key, known.length, known.ids, meta, content))

    def _keep(self, digest: bytes, layout: MediaLayout) -> None:
        self._drop(digest)
        self._layouts[digest] = layout
        self._ids += len(layout.ids or ())
        while len(self._layouts) > self._max_items or self._ids > self._max_ids:
            self._drop(next(iter(self._layouts)))

    def _drop(self, digest: bytes) -> None:
        layout = self._layouts.pop(digest, None)
        if layout is not None:
            self._ids -= len(layout.ids or ())


async def content_digests(items: Sequence[MediaItem]) -> tuple[bytes, ...]:
    """Digests of all bytes of each item; large ones are computed in a thread."""
    if sum(len(item.data) for item in items) <= INLINE_BYTES:
        return tuple(map(_content_digest, items))
    return await asyncio.to_thread(lambda: tuple(map(_content_digest, items)))


def _content_digest(item: MediaItem) -> bytes:
    if item.prepared is not None:
        return item.prepared.meta.key
    digest = hashlib.sha256(f"{item.kind} {item.form} {item.options} ".encode())
    digest.update(item.data)
    return digest.digest()
