from triptych.media import decoded
from triptych.media.base import Prepared
from triptych.messages import MediaMeta
from triptych.transfer.base import Array


def prepared(size):
    array = Array(memoryview(bytes(size)), "uint8", (size,))
    return Prepared(MediaMeta(bytes(32), 1), (array,), 1)


def test_the_cache_forgets_what_was_least_lately_used():
    cache = decoded.DecodedCache(100)
    for key in "abcd":
        cache.put(key, prepared(25))
    cache.get("a")
    cache.put("e", prepared(20))
    assert [key for key in "abcde" if cache.get(key)] == ["a", "c", "d", "e"]
    assert cache.bytes == 95
    assert cache.evictions == 1


def test_the_cache_keeps_nothing_over_a_quarter():
    cache = decoded.DecodedCache(100)
    cache.put("a", prepared(26))
    assert len(cache) == 0
    cache.put("b", prepared(25))
    assert len(cache) == 1
