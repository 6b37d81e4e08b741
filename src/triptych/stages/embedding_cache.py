"""Embeddings that are kept for re-use: by media key, within a tenant's salt, bounded in bytes.

A file that was seen before is known by its bytes too, so that a hit costs no decoding. Evicting
an embedding takes nothing from those who use it: its memory goes back when the last of them is
done.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field

from triptych.engines.base import Media

NAMES = 8  # files that one embedding is known by, at most

Scoped = tuple[str, bytes]  # salt, and media key or digest of a file


@dataclass(slots=True)
class _Kept:
    media: Media
    size: int
    files: list[Scoped] = field(default_factory=list)


class EmbeddingCache:
    """``limit`` bounds its bytes, ``largest`` those of a single embedding; 0: nothing.

    ``most`` bounds how many there are: each may hold a descriptor.
    """

    def __init__(self, limit: int, largest: int, most: int) -> None:
        self._limit = limit
        self._most = most
        self._largest = min(largest, limit)
        self._kept: OrderedDict[Scoped, _Kept] = OrderedDict()  # the longest unused first
        self._keys: dict[Scoped, bytes] = {}  # of files, by digest
        self.bytes = 0
        self.hits = 0
        self.misses = 0
        self.evictions = 0

    def __len__(self) -> int:
        return len(self._kept)

    @property
    def arrays(self) -> int:
        """Pieces of memory that it holds."""
        return sum(len(kept.media.arrays) for kept in self._kept.values())

    @property
    def counters(self) -> dict[str, float]:
        return {
            "embedding_cache_hits": self.hits,
            "embedding_cache_misses": self.misses,
            "embedding_cache_evictions": self.evictions,
            "embedding_cache_bytes": self.bytes,
            "embedding_cache_items": len(self._kept),
        }

    def find_file(self, salt: str, digest: bytes) -> Media | None:
        """The embedding of a file that was seen before. Counts a hit, but no miss: it may still
        be known by its content."""
        key = self._keys.get((salt, digest))
        return None if key is None else self.find(salt, key)

    def find(self, salt: str, key: bytes) -> Media | None:
        kept = self._kept.get((salt, key))
        if kept is None:
            return None
        self._kept.move_to_end((salt, key))
        self.hits += 1
        return kept.media

    def keep(self, salt: str, media: Media) -> None:
        """Keep it unless it is too large, and let go of what was not used for longest."""
        size = sum(array.buffer.nbytes for array in media.arrays)
        where = (salt, media.meta.key)
        if not 0 < size <= self._largest or where in self._kept:
            return
        self._kept[where] = _Kept(media, size)
        self.bytes += size
        while self.bytes > self._limit or len(self._kept) > self._most:
            self._evict()

    def name(self, salt: str, digest: bytes, key: bytes) -> None:
        """From now on the file of this digest is known to show what ``key`` is the identity of."""
        kept = self._kept.get((salt, key))
        file = (salt, digest)
        if kept is None or file in self._keys:
            return
        if len(kept.files) == NAMES:
            del self._keys[kept.files.pop(0)]
        kept.files.append(file)
        self._keys[file] = key

    def _evict(self) -> None:
        _, kept = self._kept.popitem(last=False)
        for file in kept.files:
            del self._keys[file]
        self.bytes -= kept.size
        self.evictions += 1
