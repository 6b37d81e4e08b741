"""What answers have told of media items: so that a prompt can be laid out before it is sent.

A frontend sees files and one placeholder for each; which key a file has, and which tokens take the
place of its placeholder, workers have told with earlier answers. Nobody is asked for it: what is
not known yet is cached nowhere either. Where a mistake costs a cache hit files are told apart by
traits; where an item's bytes will not be sent, and a mistake would be another picture's answer, by
all of their bytes (``digests``). Bounded; what was not used for longest is forgotten.
"""

from __future__ import annotations

import asyncio
import hashlib
from array import array
from collections.abc import Iterable, Sequence

from msgspec import Struct

from triptych.messages import MediaItem, MediaMeta, MediaSpan
from triptych.pipeline.router import sample_digest

MOST_ITEMS = 16384
MOST_IDS = 4 << 20  # tokens that are kept word by word, of all items
INLOOP = 256 << 10  # bytes that are hashed on the event loop


class MediaLayout(Struct, frozen=True):
    """What stands in an expanded prompt where an item's placeholder was."""

    key: bytes
    length: int
    ids: array[int] | None = None  # None: its placeholder again and again
    meta: MediaMeta | None = None  # for whoever must lay it out without an encoder
    digest: bytes = b""  # of the bytes that the meta is of; empty: it is not known of which

    def tokens(self, placeholder: int) -> Sequence[int]:
        return (placeholder,) * self.length if self.ids is None else self.ids


class MediaLayoutCache:
    def __init__(self, items: int = MOST_ITEMS, ids: int = MOST_IDS) -> None:
        self._items = items
        self._most_ids = ids
        self._places: dict[bytes, MediaLayout] = {}  # by trait, the latest last
        self._ids = 0

    def __len__(self) -> int:
        return len(self._places)

    def find(self, item: MediaItem) -> MediaLayout | None:
        """What is known of an item. It counts as used."""
        mark = sample_digest(item)
        place = self._places.pop(mark, None)
        if place is not None:
            self._places[mark] = place
        elif item.prepared is not None:
            meta = item.prepared.meta
            return MediaLayout(meta.key, meta.tokens, None, meta, _digest(item))
        return place

    def hear(self, items: Iterable[MediaItem], places: Iterable[MediaSpan]) -> None:
        """As they stand in a prompt that a worker has laid out. No places: it does not tell."""
        for item, told in zip(items, places, strict=False):
            mark = sample_digest(item)
            known = self._places.get(mark)
            same = known is not None and known.key == told.key
            meta, digest = (known.meta, known.digest) if known and same else (None, b"")
            ids = array("q", told.ids) if told.ids else None
            self._keep(mark, MediaLayout(told.key, told.length, ids, meta, digest))

    def encoded(self, item: MediaItem, meta: MediaMeta, digest: bytes = b"") -> None:
        """What an encoder tells, before a prompt was laid out: most often the rest follows."""
        mark = sample_digest(item)
        known = self._places.get(mark)
        if known is None or known.key != meta.key:
            self._keep(mark, MediaLayout(meta.key, meta.tokens, None, meta, digest))
        elif known.meta is None or known.digest != digest:
            self._keep(mark, MediaLayout(known.key, known.length, known.ids, meta, digest))

    def _keep(self, mark: bytes, place: MediaLayout) -> None:
        self._forget(mark)
        self._places[mark] = place
        self._ids += len(place.ids or ())
        while len(self._places) > self._items or self._ids > self._most_ids:
            self._forget(next(iter(self._places)))

    def _forget(self, mark: bytes) -> None:
        place = self._places.pop(mark, None)
        if place is not None:
            self._ids -= len(place.ids or ())


async def content_digests(items: Sequence[MediaItem]) -> tuple[bytes, ...]:
    """What tells items apart for sure: of all their bytes, many of them in a thread."""
    if sum(len(item.data) for item in items) <= INLOOP:
        return tuple(map(_digest, items))
    return await asyncio.to_thread(lambda: tuple(map(_digest, items)))


def _digest(item: MediaItem) -> bytes:
    if item.prepared is not None:
        return item.prepared.meta.key
    digest = hashlib.sha256(f"{item.kind} {item.form} ".encode())
    digest.update(item.data)
    return digest.digest()
