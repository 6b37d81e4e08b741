"""Reading responses: what is one, and how much of what is none a server may send."""

import pytest

from support.hostile_servers import ENDLESS
from triptych.sources.http_response import (
    MAX_HEADER_LINES,
    MAX_INTERIM_RESPONSES,
    OVERHEAD_BYTES,
    BadResponse,
    ResponseReader,
)

OK = b"HTTP/1.1 200 OK\r\n"
CHUNKED = OK + b"Transfer-Encoding: chunked\r\n\r\n"


def read(data, step=1 << 20, end=False):
    reader, pieces = ResponseReader(), []
    for at in range(0, len(data), step):
        pieces += reader.feed(data[at : at + step])
    if end:
        reader.end()
    return reader, b"".join(pieces)


@pytest.mark.parametrize("step", [1, 7, 1 << 20])
@pytest.mark.parametrize(
    ("data", "body", "kept"),
    [
        (OK + b"Content-Length: 3\r\n\r\nabc", b"abc", True),
        (OK + b"Content-Length: 0\r\n\r\n", b"", True),
        (OK + b"Connection: close\r\nContent-Length: 3\r\n\r\nabc", b"abc", False),
        (OK + b"Content-Length: 3\r\n\r\nabc" + OK, b"abc", False),
        (OK + b"Connection: close\r\nContent-Length: 3\r\n\r\nabcdef", b"abc", False),
        (CHUNKED + b"3;a=b\r\nabc\r\n1\r\nd\r\n0\r\nX: y\r\n\r\n", b"abcd", True),
        (
            b"HTTP/1.1 103 Hints\r\nETag: no\r\n\r\n" + OK + b"Content-Length: 1\r\n\r\na",
            b"a",
            True,
        ),
    ],
)
def test_reads_a_response(data, body, kept, step):
    reader, found = read(data, step)
    assert (reader.status, found, reader.complete) == (200, body, True)
    assert reader.keep_alive == kept
    assert "etag" not in reader.headers


def test_keeps_the_headers_that_matter_and_joins_those_that_come_twice():
    head = b"Cache-Control: no-store\r\nX: y\r\nCACHE-control: max-age=5\r\nETag: " + b"e" * 9000
    reader, _ = read(OK + head + b"\r\nContent-Length: 0\r\n\r\n")
    assert reader.headers["cache-control"] == "no-store, max-age=5"
    assert len(reader.headers["etag"]) < 9000
    assert "x" not in reader.headers


def test_a_closed_connection_ends_only_a_body_that_nothing_else_ends():
    reader, body = read(OK + b"\r\nabc", end=True)
    assert (body, reader.complete, reader.keep_alive) == (b"abc", True, False)
    for data in (b"", OK, OK + b"Content-Length: 4\r\n\r\nabc", CHUNKED + b"3\r\nabc\r\n"):
        with pytest.raises(BadResponse):
            read(data, end=True)


@pytest.mark.parametrize(
    "data",
    [
        b"220 hidden ESMTP\r\n\r\n",
        OK + b"Transfer-Encoding: gzip\r\n\r\nabc",
        OK + b"Transfer-Encoding: chunked\r\nContent-Length: 3\r\n\r\nabc",
        OK + b"Content-Length: 3\r\nContent-Length: 4\r\n\r\nabc",
        OK + b"Content-Length: 99999999999999999999999999\r\n\r\n",
        CHUNKED + b"hidden\r\n",
    ],
)
def test_bytes_that_are_not_http_are_refused(data):
    with pytest.raises(BadResponse):
        read(data)


@pytest.mark.parametrize("path", ENDLESS)
def test_b43_what_is_not_body_is_bounded(path):
    start, again = ENDLESS[path]
    reader = ResponseReader()
    list(reader.feed(start))
    with pytest.raises(BadResponse):
        list(reader.feed(again * (1 + (1 << 20) // len(again))))
    assert reader.received <= 9 / 8 * OVERHEAD_BYTES + (16 << 10)


def test_b43_some_of_it_is_fine():
    interim = b"HTTP/1.1 100 Continue\r\n\r\n" * MAX_INTERIM_RESPONSES
    lines = b"X: y\r\n" * (MAX_HEADER_LINES - 1)
    reader, body = read(interim + OK + lines + b"Content-Length: 3\r\n\r\nabc")
    assert (reader.status, body) == (200, b"abc")
    for more in (b"HTTP/1.1 100 Continue\r\n\r\n" + interim + OK, OK + lines + b"X: y\r\n" * 2):
        with pytest.raises(BadResponse):
            read(more + b"Content-Length: 3\r\n\r\nabc")


def test_b43_a_body_in_small_chunks_is_fine():
    chunk = b"40\r\n" + b"x" * 64 + b"\r\n"
    reader, body = read(CHUNKED + chunk * 50_000 + b"0\r\n\r\n")
    assert len(body) == 64 * 50_000
    assert reader.complete
