"""Kept by content within a salt, bounded in bytes, the longest unused given up first."""

from dataclasses import replace

from triptych.engines.base import Media
from triptych.messages import MediaMeta
from triptych.stages.embedding_cache import FILES, EmbeddingCache
from triptych.transfer.base import Array
from triptych.transfer.pool import segment_footprint

SIZE = segment_footprint(100)  # what the least embedding takes


def media(key: bytes, size: int = 100) -> Media:
    return Media(MediaMeta(key, 1), (Array(memoryview(bytearray(size)), "uint8", (size,)),))


def test_a_cached_item_is_found_and_counted():
    cache = EmbeddingCache(10 * SIZE, 10 * SIZE, 100)
    assert cache.find("", b"a") is None
    one = media(b"a")
    cache.keep("", one)
    assert cache.find("", b"a") is one
    assert (cache.hits, cache.entries.bytes, len(cache), cache.arrays) == (1, SIZE, 1, 1)
    assert cache.counters["embedding_cache_hits"] == 1


def test_on_a_gpu_it_counts_for_what_it_takes_there():
    cache = EmbeddingCache(8 << 20, 8 << 20, 100)
    for key in (b"a", b"b", b"c", b"d"):
        [array] = media(key).arrays
        cache.keep("", Media(MediaMeta(key, 1), (replace(array, gpu=0),)))
    assert len(cache) == 3  # CUDA gives 2 MiB at least, and a page for the table


def test_B41_another_salt_finds_nothing():
    cache = EmbeddingCache(10 * SIZE, 10 * SIZE, 100)
    cache.keep("alice", media(b"a"))
    cache.link("alice", b"file", b"a")
    assert cache.find("bob", b"a") is None
    assert cache.find_file("bob", b"file") is None
    assert cache.find_file("alice", b"file") is not None


def test_the_least_recently_used_is_evicted_first_with_the_names_of_its_files():
    cache = EmbeddingCache(3 * SIZE, 3 * SIZE, 100)
    for key in (b"a", b"b", b"c"):
        cache.keep("", media(key))
        cache.link("", b"file " + key, key)
    assert cache.find("", b"a") is not None
    cache.keep("", media(b"d"))
    assert cache.find("", b"b") is None
    assert cache.find_file("", b"file b") is None
    assert cache.find_file("", b"file a") is not None
    assert (cache.entries.bytes, cache.entries.evictions) == (3 * SIZE, 1)
    assert len(cache._keys) == 2


def test_an_item_over_the_limit_is_not_cached_and_evicts_nothing():
    cache = EmbeddingCache(3 * SIZE, SIZE, 100)
    cache.keep("", media(b"a"))
    cache.keep("", media(b"large", SIZE))
    assert cache.find("", b"large") is None
    assert cache.find("", b"a") is not None
    off = EmbeddingCache(0, SIZE, 100)
    off.keep("", media(b"a"))
    assert len(off) == off.entries.bytes == 0


def test_keeping_twice_counts_once():
    cache = EmbeddingCache(10 * SIZE, 10 * SIZE, 100)
    for _ in range(3):
        cache.keep("", media(b"a"))
    assert (cache.entries.bytes, len(cache)) == (SIZE, 1)


def test_an_embedding_is_known_by_few_files():
    cache = EmbeddingCache(10 * SIZE, 10 * SIZE, 100)
    cache.keep("", media(b"a"))
    for number in range(FILES + 5):
        cache.link("", b"%d" % number, b"a")
    assert len(cache._keys) == FILES
    assert cache.find_file("", b"%d" % (FILES + 4)) is not None
    assert cache.find_file("", b"0") is None
    cache.link("", b"file", b"nothing")
    assert cache.find_file("", b"file") is None


def test_there_are_never_more_than_may_be():
    cache = EmbeddingCache(10 * SIZE, SIZE, most=3)
    for number in range(5):
        cache.keep("", media(b"%d" % number, 1))
    assert len(cache) == 3
    assert cache.find("", b"4") is not None
    assert cache.find("", b"1") is None
    assert cache.entries.bytes == 3 * SIZE
