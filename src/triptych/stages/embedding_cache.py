"""Embeddings that are kept for re-use: by media key, within a tenant's salt, bounded in bytes.

A file that was seen before is known by its bytes too, so that a hit costs no decoding. Evicting
an embedding takes nothing from those who use it: its memory goes back when the last of them is
done.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from triptych.engines.base import Media
from triptych.runtime.caching import LRUCache
from triptych.transfer.base import Array
from triptych.transfer.cuda import SMALLEST_GPU_SEGMENT
from triptych.transfer.pool import segment_footprint

FILES = 8  # files that one embedding is known by, at most

Scoped = tuple[str, bytes]  # salt, and media key or digest of a file


@dataclass(slots=True)
class _Entry:
    media: Media
    files: list[Scoped] = field(default_factory=list)


class EmbeddingCache:
    """``limit`` bounds its bytes, ``largest`` those of a single embedding; 0: nothing.

    ``most`` bounds how many there are: each may hold a descriptor.
    """

    def __init__(self, limit: int, largest: int, most: int) -> None:
        self.kept: LRUCache[Scoped, _Entry] = LRUCache(limit, largest=largest, most=most)
        self._keys: dict[Scoped, bytes] = {}  # of files, by digest
        self.hits = 0
        self.misses = 0

    def __len__(self) -> int:
        return len(self.kept)

    @property
    def arrays(self) -> int:
        """Pieces of memory that it holds."""
        return sum(len(entry.media.arrays) for entry in self.kept.values)

    @property
    def counters(self) -> dict[str, float]:
        return {
            "embedding_cache_hits": self.hits,
            "embedding_cache_misses": self.misses,
            "embedding_cache_evictions": self.kept.evictions,
            "embedding_cache_bytes": self.kept.bytes,
            "embedding_cache_items": len(self.kept),
        }

    def find_file(self, salt: str, digest: bytes) -> Media | None:
        """The embedding of a file that was seen before. Counts a hit, but no miss: it may still
        be known by its content."""
        key = self._keys.get((salt, digest))
        return None if key is None else self.find(salt, key)

    def find(self, salt: str, key: bytes) -> Media | None:
        entry = self.kept.find((salt, key))
        if entry is None:
            return None
        self.hits += 1
        return entry.media

    def keep(self, salt: str, media: Media) -> None:
        """Keep it unless it is too large, and let go of what was not used for longest."""
        size = sum(map(_footprint, media.arrays))
        for gone in self.kept.keep((salt, media.meta.key), _Entry(media), size):
            for file in gone.files:
                del self._keys[file]

    def link(self, salt: str, digest: bytes, key: bytes) -> None:
        """From now on the file of this digest is known to show what ``key`` is the identity of."""
        entry = self.kept.find((salt, key))
        file = (salt, digest)
        if entry is None or file in self._keys:
            return
        if len(entry.files) == FILES:
            del self._keys[entry.files.pop(0)]
        entry.files.append(file)
        self._keys[file] = key


def _footprint(array: Array) -> int:
    if array.gpu is None:
        return segment_footprint(array.buffer.nbytes)
    return segment_footprint(array.buffer.nbytes, SMALLEST_GPU_SEGMENT)
