"""Data URLs are cut out of raw JSON without changing what the JSON says."""

import base64
import json
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from triptych.api import content
from triptych.api.content import decode_data_url
from triptych.errors import PayloadTooLarge, TooManyMedia
from triptych.runtime.process import allocate_lazily

LONG = "data:image/png;base64," + base64.b64encode(bytes(300)).decode()
BARE = base64.b64encode(bytes(content.MIN_BASE64)).decode()
KEYS = [
    "url",
    "data",
    "file_data",
    "image_url",
    "image_embeds",
    "audio_embeds",
    "a",
    '"url"',
    "x\\",
    'x"data',
    "_embeds",
]


def cut(raw, size, most=64 << 20, items=100):
    return content.extract_media(raw, size, most, items)


def mapped(raw):
    memory = allocate_lazily(len(raw))
    memory[:] = raw
    return memory


def restored(value, slices):
    """What a client meant, with the marks replaced by what they stand for."""
    if isinstance(value, dict):
        return {name: restored(inner, slices) for name, inner in value.items()}
    if isinstance(value, list):
        return [restored(inner, slices) for inner in value]
    return bytes(slices[value]).decode() if value in slices else value


strings = st.one_of(
    st.text(max_size=20),
    st.sampled_from(
        [
            *('"url":"data:x"', '\\"url": "data:', "url", '"url"', "\\", '"', "data:", LONG, BARE),
            *('"data":"', '_embeds": "', BARE[:-2] + "\\", BARE + '"url":"data:'),
            f'"data": "{BARE}"',
        ]
    ),
    st.text(alphabet='"\\url:dat, ', max_size=30),
)
trees = st.recursive(
    strings | st.none() | st.integers(),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.sampled_from(KEYS) | strings, inner, max_size=4)
    ),
    max_leaves=20,
)


@given(trees, st.sampled_from([None, 1]), st.booleans())
def test_cut_keeps_the_meaning(tree, indent, ascii):
    raw = json.dumps(tree, indent=indent, ensure_ascii=ascii).encode()
    text, slices = cut(raw, len(raw))
    assert restored(json.loads(bytes(text)), slices) == tree


@given(st.binary(max_size=200))
def test_cut_takes_anything(raw):
    cut(raw, len(raw))
    longer = b'{"url":"data:' + raw
    cut(longer, len(longer))


def test_cut_is_short_where_pictures_are():
    raw = json.dumps({"image_url": {"url": LONG}, "more": [{"url": LONG}]}).encode()
    text, slices = cut(raw, len(raw))
    assert len(text) < 150
    assert [bytes(s).decode() for s in slices.values()] == [LONG, LONG]


def test_bare_base64_is_cut_where_it_is_long():
    tree = {"data": BARE, "x": [{"video_embeds": BARE}, {"url": LONG}, {"data": BARE[:40]}]}
    raw = json.dumps(tree).encode()
    text, slices = cut(raw, len(raw))
    assert len(text) < 300
    assert sorted(bytes(s).decode() for s in slices.values()) == sorted([LONG, BARE, BARE])
    assert BARE[:40].encode() in bytes(text)
    assert restored(json.loads(bytes(text)), slices) == tree


def test_bytes_behind_the_body_are_not_looked_at():
    raw = json.dumps({"data": "a"}).encode()
    longer = raw + json.dumps({"data": BARE, "url": LONG}).encode()
    text, slices = cut(longer, len(raw))
    assert (bytes(text), slices) == (raw, {})


def test_escaped_slashes_are_cut_too():
    """Some writers of JSON put a backslash before every slash."""
    raw = json.dumps({"url": LONG + "//8="}).replace("/", "\\/").encode()
    text, slices = cut(raw, len(raw))
    assert [bytes(s).decode() for s in slices.values()] == [LONG + "//8="]
    assert len(text) < 60


@pytest.mark.parametrize(
    "url", [LONG, LONG.replace("image/png", "image/PNG;charset=x"), "data:;base64,AAAA"]
)
def test_media(url):
    for raw in (json.dumps({"url": url}), json.dumps({"url": url}).replace("d", "\\u0064")):
        text, slices = cut(raw.encode(), len(raw.encode()))
        assert decode_data_url(
            json.loads(bytes(text))["url"], slices, "image", "file", "x"
        ) == base64.b64decode(url.split(",")[1])


@given(trees, st.integers(0, 2 * content.FIRST_STEP), st.sampled_from([bytes, bytearray, mapped]))
def test_what_is_cut_does_not_hang_on_where_it_stands(tree, spaces, kind):
    """Names and values lie across the borders of the pieces that are looked at."""
    raw = json.dumps(tree).encode()
    long = b" " * spaces + raw + b" " * content.STEP
    text, slices = cut(kind(long), len(long))
    assert len(bytes(text).strip()) == len(cut(raw, len(raw))[0])
    assert restored(json.loads(bytes(text)), slices) == tree


def test_values_are_cut_across_every_border():
    url = json.dumps({"url": LONG}).encode().replace(b"image/png", b"image\\/png")
    for spaces in range(content.FIRST_STEP - len(url) - 5, content.FIRST_STEP + 5):
        long = b" " * spaces + url + b" " * content.STEP
        text, slices = cut(long, len(long))
        assert [bytes(found).decode() for found in slices.values()] == [LONG]
        assert len(text) < spaces + content.STEP + 60


@pytest.mark.parametrize("end", [b"n", b"u0041", b'"'])
def test_an_escape_is_seen_across_every_border(end):
    for length in range(content.FIRST_STEP - 3, content.FIRST_STEP + 4):
        raw = b'{"url":"data:' + b"A" * length + b"\\" + end + b'", "a": 1}'
        text, slices = cut(raw, len(raw))
        assert (bytes(text), slices) == (raw, {})


@pytest.mark.parametrize(
    "piece", [b'"url":"data:\\n', b'"data": "",', b'"url",', b'"url":"data:\\"']
)
def test_after_many_names_for_nothing_the_rest_is_left(monkeypatch, piece):
    """However many names there are, few are looked at: the work is bounded."""
    looked = []
    end = content._find_end
    monkeypatch.setattr(content, "_find_end", lambda *place: looked.append(place) or end(*place))
    raw = piece * 20_000 + json.dumps({"url": LONG}).encode()
    text, slices = cut(raw, len(raw))
    assert (bytes(text), slices) == (raw, {})
    assert len(looked) <= content.MAX_MISSES


def test_too_many_media_are_refused_at_the_first(monkeypatch):
    raw = b'{"url":"data:,"},' * 100_000
    looked = []
    end = content._find_end
    monkeypatch.setattr(content, "_find_end", lambda *place: looked.append(place) or end(*place))
    with pytest.raises(TooManyMedia, match="limit of 3"):
        cut(raw, len(raw), items=3)
    assert len(looked) == 4
    three = b"[" + raw[: 3 * 17 - 1] + b"]"
    assert len(cut(three, len(three), items=3)[1]) == 3


@pytest.mark.parametrize(
    "before", [b"", json.dumps({"url": LONG}).encode(), b'{"url":"data:', b'{"url":"data:\\n']
)
def test_too_much_without_media_is_refused(before):
    raw = mapped(before + b"A" * (4 << 20))
    with pytest.raises(PayloadTooLarge):
        cut(raw, len(raw), most=1 << 20)
    with pytest.raises(PayloadTooLarge):
        cut(bytes(2000), 2000, most=1000)
    assert cut(bytes(1000), 1000, most=1000)[0] == bytes(1000)


def test_a_large_body_in_a_map_is_cut_as_bytes_are():
    picture = base64.b64encode(random.Random(1).randbytes(3 << 20)).decode()
    url = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{picture}"}}
    raw = json.dumps({"messages": [{"role": "user", "content": [url, url]}]}).encode()
    text, slices = cut(mapped(raw), len(raw))
    other_text, others = cut(raw, len(raw))
    assert len(text) == len(other_text) < 300
    assert list(slices.values()) == list(others.values())
    assert not slices.keys() & others.keys()  # no request can name what another has
