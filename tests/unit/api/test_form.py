"""Forms: what well-formed ones hold, and that all others are refused without much work."""

import contextlib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from support.forms import form
from triptych.api import form as module
from triptych.api.form import MAX_FORM_FIELDS, parse_form
from triptych.errors import InvalidForm

names = st.text("abcdefgh[]_", min_size=1, max_size=8)


def parse(fields, boundary="xYz"):
    headers, body = form(fields, boundary)
    return parse_form(headers["Content-Type"].encode(), bytearray(body), len(body))


@settings(deadline=None)
@given(
    st.lists(
        st.tuples(names, st.binary(max_size=40) | st.text("abcé\r\n", max_size=20)), max_size=6
    )
)
def test_fields_come_back(fields):
    found = parse(fields)
    assert [field.name for field in found] == [name for name, _ in fields]
    for field, (_, value) in zip(found, fields, strict=True):
        assert field.is_file == isinstance(value, bytes)
        assert bytes(field.data) == (value if field.is_file else value.encode())
        if not field.is_file:
            assert field.text() == value


@pytest.mark.parametrize("step", [16, 40, 1 << 20])
def test_a_file_is_found_in_steps_of_any_size(monkeypatch, step):
    monkeypatch.setattr(module, "FORM_STEP", step)
    data = b"\r\n--xY" * 100 + b"\r\n--xy" + bytes(range(256))
    assert bytes(parse([("file", data)])[0].data) == data


@settings(deadline=None)
@given(st.binary(max_size=300), st.binary(max_size=80))
def test_b55_bytes_that_are_no_form_are_refused(body, kind):
    for given_type in (kind, b"multipart/form-data; boundary=x"):
        with pytest.raises(InvalidForm):
            parse_form(given_type, bytearray(body), len(body))


@settings(deadline=None)
@given(st.data())
def test_b55_a_damaged_form_is_refused_or_read(data):
    """Never another error."""
    headers, body = form([("model", "tiny"), ("file", b"some bytes"), ("prompt", "a")])
    at = data.draw(st.integers(0, len(body)))
    end = data.draw(st.integers(at, min(at + 20, len(body))))
    damaged = bytearray(body[:at] + data.draw(st.binary(max_size=10)) + body[end:])
    with contextlib.suppress(InvalidForm):
        parse_form(headers["Content-Type"].encode(), damaged, len(damaged))


@pytest.mark.parametrize(
    "kind",
    [
        b"multipart/form-data",
        b"multipart/form-data; boundary=",
        b'multipart/form-data; boundary=""',
        b"multipart/mixed; boundary=xYz",
        b"multipart/form-data; boundary=" + b"x" * 71,
        b'multipart/form-data; boundary="x',
        b"multipart/form-data" + b"; a=b" * 2000,
    ],
)
def test_b55_a_content_type_without_a_boundary_is_refused(kind):
    _, body = form([("a", "b")])
    with pytest.raises(InvalidForm):
        parse_form(kind, bytearray(body), len(body))


@pytest.mark.parametrize(
    "kind",
    [
        b"multipart/form-data; boundary=xYz",
        b'Multipart/Form-Data; charset=utf-8; boundary="xYz"',
        b"multipart/form-data;boundary=xYz; charset=utf-8",
    ],
)
def test_content_types_of_clients(kind):
    _, body = form([("a", "b")])
    assert parse_form(kind, bytearray(body), len(body))[0].text() == "b"


def test_b55_bounds():
    assert len(parse([("a", "b")] * MAX_FORM_FIELDS)) == MAX_FORM_FIELDS
    with pytest.raises(InvalidForm, match="more than"):
        parse([("a", "b")] * (MAX_FORM_FIELDS + 1))
    with pytest.raises(InvalidForm, match="head"):
        parse([("a" * 5000, "b")])
    with pytest.raises(InvalidForm, match="long name"):
        parse([("a" * 65, "b")])
    with pytest.raises(InvalidForm, match="must be text"):
        parse([("a", "b" * (65 << 10))])[0].text()
    with pytest.raises(InvalidForm, match="must be text"):
        parse([("a", b"b")])[0].text()


@pytest.mark.parametrize(
    "head",
    [
        b"Content-Type: text/plain",
        b"Content-Disposition: form-data",
        b'Content-Disposition: form-data; filename="a"',
        b'Content-Disposition: form-data; name="a"; name="b"',
        b'Content-Disposition: form-data; name="a\\"b"',
        b'Content-Disposition: form-data; name="\xff"',
        b'Content-Disposition: attachment; name="a"',
        b'Content-Disposition: form-data; name="a"\r\nContent-Transfer-Encoding: base64',
    ],
)
def test_b55_heads_of_fields_that_are_refused(head):
    body = b"--x\r\n" + head + b"\r\n\r\nb\r\n--x--\r\n"
    with pytest.raises(InvalidForm):
        parse_form(b"multipart/form-data; boundary=x", bytearray(body), len(body))
