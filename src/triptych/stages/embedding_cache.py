"""The cache of embeddings: by media key and tenant's salt, bounded in bytes.

It also finds an embedding by the digest of a file that was seen before, so that a hit costs no
decoding. An evicted embedding stays valid for requests that use it: its memory is freed after the
last of them.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from triptych.engines.base import Media
from triptych.runtime.caching import LRUCache
from triptych.transfer.base import Array
from triptych.transfer.cuda import SMALLEST_GPU_SEGMENT
from triptych.transfer.pool import segment_footprint

FILES = 8  # that one embedding is found by, at most

Scoped = tuple[str, bytes]  # salt, and media key or digest of a file


@dataclass(slots=True)
class _CachedEmbedding:
    media: Media
    files: list[Scoped] = field(default_factory=list)


class EmbeddingCache:
    """``limit`` bounds its bytes, ``largest`` those of a single embedding; 0: nothing.

    ``most`` bounds how many there are: each may hold a descriptor.
    """

    def __init__(self, limit: int, largest: int, most: int) -> None:
        self.entries: LRUCache[Scoped, _CachedEmbedding] = LRUCache(
            limit, largest=largest, most=most
        )
        self._keys: dict[Scoped, bytes] = {}  # of files, by digest
        self.hits = 0
        self.misses = 0

    def __len__(self) -> int:
        return len(self.entries)

    @property
    def arrays(self) -> int:
        """Pieces of memory that it holds."""
        return sum(len(entry.media.arrays) for entry in self.entries.values)

    @property
    def counters(self) -> dict[str, float]:
        return {
            "embedding_cache_hits": self.hits,
            "embedding_cache_misses": self.misses,
            "embedding_cache_evictions": self.entries.evictions,
            "embedding_cache_bytes": self.entries.bytes,
            "embedding_cache_items": len(self.entries),
        }

    def find_file(self, salt: str, digest: bytes) -> Media | None:
        """The embedding of a file that was seen before. Counts a hit, but no miss: ``find`` may
        still find it by its content."""
        key = self._keys.get((salt, digest))
        return None if key is None else self.find(salt, key)

    def find(self, salt: str, key: bytes) -> Media | None:
        entry = self.entries.get((salt, key))
        if entry is None:
            return None
        self.hits += 1
        return entry.media

    def keep(self, salt: str, media: Media) -> None:
        """Cache an embedding unless it is too large, and evict the least recently used."""
        size = sum(map(_footprint, media.arrays))
        for gone in self.entries.put((salt, media.meta.key), _CachedEmbedding(media), size):
            for file in gone.files:
                del self._keys[file]

    def link(self, salt: str, digest: bytes, key: bytes) -> None:
        """Let ``find_file`` find the embedding of ``key`` by this file's digest."""
        entry = self.entries.get((salt, key))
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
