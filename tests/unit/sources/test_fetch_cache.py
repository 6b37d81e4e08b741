"""The cache of fetched files: what it keeps, for how long, and what it never does."""

import pytest

from triptych.sources.fetch import ENTRY_OVERHEAD, MAX_FRESH_SECONDS, FetchCache

URL = "http://ok/a"


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


def size(data, url=URL, final=URL, etag="1"):
    """What a file is counted for in the scope "s"."""
    return ENTRY_OVERHEAD + len(data) + 4 * len("s") + len(url) + len(final) + len(etag)


def kept(headers, final=URL, limit=1 << 20, data=b"data"):
    cache = FetchCache(limit, clock=Clock())
    cache.keep("s", URL, data, final, {name.lower(): value for name, value in headers.items()})
    return cache, cache.find("s", URL)


def test_keeps_by_url_and_scope():
    cache, file = kept({"etag": '"1"'})
    assert file.data == b"data"
    assert cache.find("other", URL) is None
    assert cache.find("s", URL + "?") is None


def test_sends_the_validators_back():
    assert kept({"etag": 'W/"1"', "last-modified": "then"})[1].conditions() == {
        "If-None-Match": 'W/"1"'
    }
    assert kept({"last-modified": "then"})[1].conditions() == {"If-Modified-Since": "then"}
    assert kept({"cache-control": "max-age=5"})[1].conditions() == {}


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"etag": '"1"', "cache-control": "no-store"},
        {"etag": '"1"', "cache-control": "public, No-Store, max-age=60"},
        {"etag": '"1"', "vary": "*"},
        {"cache-control": "max-age=0"},
        {"cache-control": "no-cache, max-age=60"},
        {"cache-control": "max-age=60", "age": "60"},
        {"cache-control": "max-age=x"},
        {"etag": "x" * 2000},
        {"etag": "\udcff"},
    ],
)
def test_keeps_nothing_that_it_may_not_or_cannot_use(headers):
    cache, file = kept(headers)
    assert file is None
    assert cache.files.bytes == 0


@pytest.mark.parametrize(
    ("rule", "age", "seconds"),
    [
        ("max-age=60", "", 60),
        ("Max-Age=60, must-revalidate", "", 60),
        ('max-age="60"', "", 60),
        ("max-age=60", "20", 40),
        ("max-age=999999999", "", MAX_FRESH_SECONDS),
        ("no-cache, max-age=60", "", 0),
        ("", "", 0),
    ],
)
def test_is_fresh_for_as_long_as_the_server_says(rule, age, seconds):
    clock = Clock()
    cache = FetchCache(1 << 20, clock=clock)
    cache.keep("s", URL, b"x", URL, {"etag": "1", "cache-control": rule, "age": age})
    file = cache.find("s", URL)
    assert file
    clock.now = max(0, seconds - 0.5)
    assert cache.is_fresh(file) == (seconds > 0)
    clock.now = seconds
    assert not cache.is_fresh(file)


def test_what_a_redirect_led_to_is_always_asked_for():
    cache, file = kept({"etag": "1", "cache-control": "max-age=60"}, final="http://ok/b")
    assert not cache.is_fresh(file)
    assert kept({"cache-control": "max-age=60"}, final="http://ok/b")[1] is None


def test_lets_the_least_recently_used_go():
    each = size(b"data", "a", "a")
    cache = FetchCache(2 * each)
    for url in ("a", "b"):
        cache.keep("s", url, b"data", url, {"etag": "1"})
    cache.find("s", "a")
    cache.keep("s", "c", b"data", "c", {"etag": "1"})
    assert [bool(cache.find("s", url)) for url in "abc"] == [True, False, True]
    assert (cache.files.evictions, cache.files.bytes, len(cache.files)) == (1, 2 * each, 2)


def test_a_file_over_the_limit_is_not_cached_and_evicts_nothing():
    cache, _ = kept({"etag": "1"}, limit=size(b"data"))
    cache.keep("s", "big", bytes(size(b"data")), "big", {"etag": "1"})
    assert cache.find("s", "big") is None
    assert cache.find("s", URL)
    assert kept({"etag": "1"}, limit=0)[1] is None


def test_long_words_of_tiny_files_are_bounded_too():
    cache = FetchCache(1 << 20)
    for i in range(200):
        url = f"http://ok/{i:03}"
        cache.keep("s" * 256, url + "x" * 8000, b"x", url + "y" * 8000, {"etag": "e" * 1000})
    assert 0 < len(cache.files) * (8000 + 8000 + 1000 + 256) <= cache.files.bytes <= 1 << 20


def test_a_newer_answer_replaces_or_removes_the_older():
    cache, _ = kept({"etag": "1"})
    cache.keep("s", URL, b"newer!", URL, {"etag": "2"})
    assert cache.find("s", URL).data == b"newer!"
    assert cache.files.bytes == size(b"newer!")
    cache.keep("s", URL, b"secret", URL, {"cache-control": "no-store"})
    assert (cache.find("s", URL), cache.files.bytes) == (None, 0)
