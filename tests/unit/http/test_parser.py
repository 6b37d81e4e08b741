"""Where requests begin and end: the same ones however their bytes are cut."""

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from triptych.errors import HeadersTooLarge, InvalidHTTP, PayloadTooLarge, TriptychError
from triptych.http.parser import ChunkDecoder, RequestParser, RequestPhase, parse_head

MOST = 4096  # bytes of a body, here
HEADS = 8192  # and of a head


def exchanges(pieces, answered_at_once=True):
    """What comes out of a parser that is driven as a connection drives it.

    Not ``answered_at_once``: an answer ends only when all bytes have come.
    """
    parser, found, handed_over = RequestParser(HEADS, 64), [], False

    def advance(ends):
        nonlocal handed_over
        while True:
            if parser.phase in (RequestPhase.IDLE, RequestPhase.HEAD):
                head = parser.read_head()
                if head is None:
                    return
                if head.length > MOST:
                    raise PayloadTooLarge("")
                if not parser.take_whole_body():
                    parser.begin_body(None if head.chunked else bytearray(head.length), MOST)
            if parser.phase is RequestPhase.BODY and not parser.read_body():
                return
            if not handed_over:
                head, body, size = parser.take_request()
                found.append((head.method, head.path, bytes(body[:size])))
            handed_over = not ends
            if not ends:
                return
            parser.finish()

    try:
        for number, piece in enumerate(pieces):
            while piece and parser.in_place:
                space = parser.free_space(len(piece))
                taken = len(space)
                space[:] = piece[:taken]
                piece = piece[taken:]
                parser.filled(taken)
            parser.receive(piece)
            advance(answered_at_once or number == len(pieces) - 1)
    except TriptychError as error:
        found.append(error.code)
    return found


@st.composite
def requests(draw):
    """Bytes of one request, and what it says."""
    body = draw(st.binary(max_size=60))
    path = draw(st.sampled_from(["/a", "/b?c=d", "/v1/media"]))
    how = draw(st.sampled_from(["length", "chunked", "none"]))
    blank = draw(st.sampled_from([b"", b"", b"\r\n"]))
    lines = b"Host: x\r\n" + draw(st.sampled_from([b"", b"X: y\r\n", b"Expect: 100-continue\r\n"]))
    if how == "none":
        return blank + b"GET %b HTTP/1.1\r\n%b\r\n" % (path.encode(), lines), ("GET", path, b"")
    head = b"POST %b HTTP/1.1\r\n%b" % (path.encode(), lines)
    if how == "length":
        data = head + b"Content-Length: %d\r\n\r\n%b" % (len(body), body)
    else:
        data = head + b"Transfer-Encoding: chunked\r\n\r\n" + draw(chunked(body))
    return blank + data, ("POST", path, body)


@st.composite
def chunked(draw, body):
    cuts = sorted({0, len(body), *draw(st.lists(st.integers(0, len(body)), max_size=5))})
    parts = [body[a:b] for a, b in itertools.pairwise(cuts)]
    extension = draw(st.sampled_from([b"", b";a", b';a="b c"', b";a=1;b=2"]))
    trailer = draw(st.sampled_from([b"", b"X-Sum: 1\r\n", b"A: b\r\nHost: y\r\n"]))
    whole = b"".join(b"%x%b\r\n%b\r\n" % (len(part), extension, part) for part in parts)
    return whole + b"0%b\r\n%b\r\n" % (extension, trailer)


@st.composite
def cut(draw, data):
    places = sorted(set(draw(st.lists(st.integers(1, max(1, len(data) - 1)), max_size=30))))
    return [data[a:b] for a, b in zip([0, *places], [*places, len(data)], strict=True)]


@settings(max_examples=80, deadline=None, derandomize=True)
@given(st.data(), st.lists(requests(), min_size=1, max_size=5), st.booleans())
def test_b50_any_cut_of_any_pipeline_gives_the_same_requests(data, asked, answered_at_once):
    stream = b"".join(raw for raw, _ in asked)
    expected = [(method, path.partition("?")[0], body) for _, (method, path, body) in asked]
    assert exchanges([stream]) == expected
    pieces = data.draw(cut(stream))
    assert exchanges(pieces, answered_at_once) == expected


@settings(max_examples=80, deadline=None, derandomize=True)
@given(st.data(), st.lists(requests(), min_size=1, max_size=3))
def test_what_is_broken_is_refused_wherever_it_is_cut(data, asked):
    """A byte changed anywhere: however it is cut, the same comes of it."""
    stream = bytearray(b"".join(raw for raw, _ in asked))
    at = data.draw(st.integers(0, len(stream) - 1))
    stream[at] = data.draw(st.integers(0, 255))
    whole = exchanges([bytes(stream)])
    assert exchanges(data.draw(cut(bytes(stream)))) == whole
    assert exchanges([bytes([byte]) for byte in stream]) == whole


def test_a_method_in_the_wrong_phase_raises():
    parser = RequestParser(HEADS, 64)
    parser.receive(b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\n\r\n")
    for early in (parser.take_whole_body, parser.take_request, parser.finish):
        with pytest.raises(AssertionError):
            early()
    assert parser.read_head() is not None
    with pytest.raises(AssertionError):
        parser.read_head()
    assert not parser.take_whole_body()
    parser.begin_body(bytearray(2), MOST)
    with pytest.raises(AssertionError):
        parser.finish()


def test_bytes_after_the_end_are_ignored():
    parser = RequestParser(HEADS, 64)
    parser.stop()
    parser.receive(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
    assert (parser.unparsed, parser.phase) == (0, RequestPhase.DONE)


@pytest.mark.parametrize(
    ("data", "error"),
    [
        (b"z\r\n", InvalidHTTP), (b"1\nx\n", InvalidHTTP), (b"-1\r\n", InvalidHTTP),
        (b"1 \r\n", InvalidHTTP), (b" 1\r\n", InvalidHTTP), (b"0x1\r\n", InvalidHTTP),
        (b"1\r\nab\r\n", InvalidHTTP), (b"1\r\na\n", InvalidHTTP), (b"1;a\nb\r\n", InvalidHTTP),
        (b"f" * 17, InvalidHTTP), (b"\r\n", InvalidHTTP), (b"0\r\nno colon\r\n\r\n", InvalidHTTP),
        (b"0\r\n: x\r\n\r\n", InvalidHTTP), (b"0\r\nA : x\r\n\r\n", InvalidHTTP),
        (b"%x\r\n" % (MOST + 1) + b"x" * (MOST + 1), PayloadTooLarge),
        (b"1;" + b"a" * HEADS, HeadersTooLarge), (b"0\r\nA: " + b"a" * HEADS, HeadersTooLarge),
        (b"0\r\n" + b"A: b\r\n" * HEADS, HeadersTooLarge),
        ((b"1;" + b"a" * 99 + b"\r\nx\r\n") * 200, HeadersTooLarge),
    ],
)  # fmt: skip
@pytest.mark.parametrize("drips", [False, True])
def test_chunks_that_are_refused(data, error, drips):
    decoder, ahead, body = ChunkDecoder(MOST, HEADS), bytearray(), bytearray()

    def feed():
        for piece in [bytes([byte]) for byte in data] if drips else [data]:
            ahead.extend(piece)
            assert not decoder.feed(ahead, body)

    with pytest.raises(error):
        feed()


def test_chunks_of_one_byte_are_accepted():
    decoder, ahead, body = ChunkDecoder(MOST, 64), bytearray(b"1\r\nx\r\n" * MOST), bytearray()
    assert not decoder.feed(ahead, body)
    assert len(body) == MOST
    ahead += b"0\r\n\r\nGET"
    assert decoder.feed(ahead, body)
    assert ahead == b"GET"


class CountingParser:
    """llhttp, and how often it was called."""

    def __init__(self, decoder):
        self._parser, self.feeds = decoder._parser, 0

    def feed_data(self, data):
        self.feeds += 1
        self._parser.feed_data(data)


@pytest.mark.parametrize(
    "data",
    [b"x", b"\r\n", b"0\r\n\r\n", b"\r\n0\r\n\r\n", b"1\r\nx\r\n", b"\r\n\r\n;"],
)
@pytest.mark.parametrize("chunk", [1, 5, 64, 1 << 20])
@pytest.mark.parametrize("trailer", [b"", b"A: b\r\n" * 9], ids=["bare", "trailer"])
def test_what_a_chunk_holds_does_not_add_calls_of_the_parser(data, chunk, trailer):
    """One call for each piece that comes in, however many ends of lines are in it."""
    body = data * (20_000 // len(data))
    chunks = [body[at : at + chunk] for at in range(0, len(body), chunk)]
    stream = b"".join(b"%x\r\n%b\r\n" % (len(c), c) for c in chunks)
    stream += b"0\r\n%b\r\n" % trailer + b"GET"
    decoder, ahead, got = ChunkDecoder(1 << 20, HEADS), bytearray(), bytearray()
    decoder._parser = counting = CountingParser(decoder)
    pieces = [stream[at : at + 4096] for at in range(0, len(stream), 4096)]
    for piece in pieces[:-1]:
        ahead += piece
        assert not decoder.feed(ahead, got)
    ahead += pieces[-1]
    assert decoder.feed(ahead, got)
    assert (got, ahead) == (body, b"GET")
    assert counting.feeds == len(pieces)


@pytest.mark.parametrize(
    "line",
    [
        b"SOURCE / ICE/1.0", b"DESCRIBE / RTSP/1.0", b"GET / RTSP/1.0", b"GET /  HTTP/1.1",
        b"PRI * HTTP/2.0", b"GET / HTTP/1.2", b"GET / HTTP/0.9", b"GET /", b"",
    ],
)  # fmt: skip
def test_b47_what_is_not_http_1_is_refused(line):
    with pytest.raises(InvalidHTTP):
        parse_head(line + b"\r\nHost: x\r\n\r\n", 64)


@pytest.mark.parametrize("length", [b"0" * 5000, b"0" * 5000 + b"5", b"0" * 20, b"9" * 19])
def test_b47_lengths_of_many_digits(length):
    data = b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: " + length + b"\r\n\r\n"
    if len(length) < 20:
        assert parse_head(data, 64).length == int(length)
    else:
        with pytest.raises(InvalidHTTP):
            parse_head(data, 64)


def test_b47_headers_of_one_name_count_each():
    lines = b"GET / HTTP/1.1\r\nHost: x\r\n" + b"A: b\r\n" * 10_000 + b"\r\n"
    with pytest.raises(HeadersTooLarge):
        parse_head(lines, 64)
    assert parse_head(lines, 10_001).headers[b"a"] == b"b"
