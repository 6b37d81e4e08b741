"""Data URLs are cut out of raw JSON without changing what the JSON says."""

import base64
import json
from typing import Annotated, Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from triptych.errors import InvalidJSON, InvalidValue, PayloadTooLarge, UnsupportedParameter
from triptych.frontend import body
from triptych.frontend.body import cut, media
from triptych.frontend.request import decode

LONG = "data:image/png;base64," + base64.b64encode(bytes(300)).decode()


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
        ['"url":"data:x"', '\\"url": "data:', "url", '"url"', "\\", '"', "data:", LONG]
    ),
    st.text(alphabet='"\\url:dat, ', max_size=30),
)
trees = st.recursive(
    strings | st.none() | st.integers(),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(
            st.sampled_from(["url", "a", '"url"', "x\\"]) | strings, inner, max_size=4
        )
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
        assert media(json.loads(bytes(text))["url"], slices, "x") == base64.b64decode(
            url.split(",")[1]
        )


class Thing(msgspec.Struct, forbid_unknown_fields=True):
    n: int = 0
    x: int = 0
    small: Annotated[int, msgspec.Meta(ge=0, le=9)] = 0
    inner: list["Thing"] = []
    any: dict[str, Any] = {}


THING = msgspec.json.Decoder(Thing)


def read(raw):
    return decode(raw, THING, len(raw), 8 << 20)


def test_indices_are_found():
    raw = b'{"inner": [{}, {}, {"inner": [{}, {"n": "x"}, {"n": "x"}]}]}'
    with pytest.raises(InvalidValue) as error:
        read(raw)
    assert error.value.param == "inner[2].inner[1].n"
    with pytest.raises(UnsupportedParameter) as error:
        read(b'{"inner": [{}, {"y": 1}]}')
    assert error.value.param == "inner[1].y"


def test_large_bad_bodies_get_a_short_answer():
    with pytest.raises(InvalidValue):
        read(b'{"inner": [' + b"{}," * 50_000 + b'{"n": "x"}]}')
    with pytest.raises(InvalidJSON):
        read(b'{"inner": [' + b"{}," * 50_000)
    with pytest.raises(PayloadTooLarge):
        read(b" " * (9 << 20))


def test_null_is_absent_in_large_bodies_too():
    thing, _ = read(b'{"any": null, "inner": [' + b"{}," * 50_000 + b"{}]}")
    assert len(thing.inner) == 50_001
    with pytest.raises(UnsupportedParameter):
        read(b'{"other": null, "inner": [' + b"{}," * 50_000 + b"{}]}")


@pytest.mark.parametrize("padding", [b"", b" " * 100_000])
@pytest.mark.parametrize("digits", [b"1" + b"0" * 400, b"-1" + b"0" * 5000, b"1" + b"0" * 5000])
def test_long_integers(padding, digits):
    with pytest.raises(InvalidValue) as error:
        read(b'{"x": 1, "small": ' + digits + b"}" + padding)
    assert error.value.param == "small"
    with pytest.raises(UnsupportedParameter) as error:
        read(b'{"y": ' + digits + b"}" + padding)
    assert error.value.param == "y"


@pytest.mark.parametrize(
    ("raw", "said"),
    [
        (b'\xef\xbb\xbf{"n": 1}', "byte order mark"),
        ('{"n": 1}'.encode("utf-16"), "byte order mark"),
        (b'{"any": {"a": "\\ud800"}}', "surrogate"),
        (b'{"any": {"a": "\xff"}}', "not valid UTF-8"),
    ],
)
def test_what_is_no_text_is_said_plainly(raw, said):
    with pytest.raises(InvalidJSON, match=said):
        read(raw)


def test_names_are_said_back_in_part():
    with pytest.raises(UnsupportedParameter) as error:
        read(json.dumps({"k" * 5000: 1}).encode())
    assert len(error.value.param) < 100
    with pytest.raises(InvalidValue) as error:
        read(b'{"' + b"k" * 5000 + b'": NaN}')
    assert len(error.value.param) < 100
