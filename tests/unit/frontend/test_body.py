"""Data URLs are cut out of raw JSON without changing what the JSON says."""

import base64
import json
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from triptych.frontend import body
from triptych.frontend.body import cut, media
from triptych.runtime.memory import blank

LONG = "data:image/png;base64," + base64.b64encode(bytes(300)).decode()
BARE = base64.b64encode(bytes(body.LONG)).decode()
KEYS = ["url", "data", "image_embeds", "audio_embeds", "a", '"url"', "x\\", 'x"data', "_embeds"]


def restored(value, slices):
    """What a client meant, with the marks replaced by what they stand for."""
    if isinstance(value, dict):
        return {name: restored(inner, slices) for name, inner in value.items()}
    if isinstance(value, list):
        return [restored(inner, slices) for inner in value]
    if isinstance(value, str) and value.startswith(body._MARK):
        return bytes(slices[int(value.removeprefix(body._MARK))]).decode()
    return value


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
    assert [bytes(s).decode() for s in slices] == [LONG, LONG]


def test_bare_base64_is_cut_where_it_is_long():
    tree = {"data": BARE, "x": [{"video_embeds": BARE}, {"url": LONG}, {"data": BARE[:40]}]}
    raw = json.dumps(tree).encode()
    text, slices = cut(raw, len(raw))
    assert len(text) < 300
    assert sorted(bytes(s).decode() for s in slices) == sorted([LONG, BARE, BARE])
    assert BARE[:40].encode() in bytes(text)
    assert restored(json.loads(bytes(text)), slices) == tree


def test_bytes_behind_the_body_are_not_looked_at():
    raw = json.dumps({"data": "a"}).encode()
    longer = raw + json.dumps({"data": BARE, "url": LONG}).encode()
    text, slices = cut(longer, len(raw))
    assert (bytes(text), slices) == (raw, [])


def test_escaped_slashes_are_cut_too():
    """Some writers of JSON put a backslash before every slash."""
    raw = json.dumps({"url": LONG + "//8="}).replace("/", "\\/").encode()
    text, slices = cut(raw, len(raw))
    assert bytes(slices[0]).decode() == LONG + "//8="
    assert len(text) < 60


@pytest.mark.parametrize(
    "url", [LONG, LONG.replace("image/png", "image/PNG;charset=x"), "data:;base64,AAAA"]
)
def test_media(url):
    for raw in (json.dumps({"url": url}), json.dumps({"url": url}).replace("d", "\\u0064")):
        text, slices = cut(raw.encode(), len(raw.encode()))
        assert media(
            json.loads(bytes(text))["url"], slices, "image", "file", "x"
        ) == base64.b64decode(url.split(",")[1])


@pytest.mark.parametrize("at", [0, 1, 10, 15, 16, 17, 30, 31])
def test_finding_in_a_map_is_as_in_bytes(monkeypatch, at):
    monkeypatch.setattr(body, "PIECE", 16)
    plain = bytearray(b"." * 40)
    plain[at : at + 5] = b'"url"'
    memory = blank(len(plain))
    memory[:] = bytes(plain)
    for start in (0, at, at + 1):
        for end in (at + 4, at + 5, len(plain)):
            assert body._find(memory, b'"url"', start, end) == plain.find(b'"url"', start, end)


def test_a_large_body_in_a_map_is_cut_as_bytes_are():
    picture = base64.b64encode(random.Random(1).randbytes(3 << 20)).decode()
    url = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{picture}"}}
    raw = json.dumps({"messages": [{"role": "user", "content": [url, url]}]}).encode()
    memory = blank(len(raw))
    memory[:] = raw
    text, slices = cut(memory, len(raw))
    assert (bytes(text), slices) == cut(raw, len(raw))
    assert len(text) < 300
