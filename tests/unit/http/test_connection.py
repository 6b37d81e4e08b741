"""A connection over a transport that is played: what no socket can be made to do at will."""

import asyncio
import errno
import json
import mmap

import pytest

from triptych.api.responses import ErrorResponse, encode
from triptych.config import Limits
from triptych.errors import NotFound
from triptych.http.bodies import LARGE_BODY, BodyAdmission, BufferPool
from triptych.http.connection import CONTINUE, IDLE_SECONDS, HTTPConnection
from triptych.http.parser import RequestPhase

POST = b"POST /a HTTP/1.1\r\nHost: x\r\n"
CHUNKED = POST + b"Transfer-Encoding: chunked\r\n"
LIMITS = Limits()


class PlayedTransport:
    """Keeps what is written; ``full`` until it is read."""

    def __init__(self):
        self.written = b""
        self.full_after = None  # a write that contains this pauses the writer
        self.reading = True
        self.closed = self.aborted = False
        self.protocol = None

    def write(self, data):
        self.written += data
        if self.full_after is not None and self.full_after in data:
            self.full_after = None
            self.protocol.pause_writing()

    def set_write_buffer_limits(self, high): ...
    def get_extra_info(self, name): ...
    def can_write_eof(self):
        return False

    def get_write_buffer_size(self):
        return 1 if self.protocol.paused else 0

    def pause_reading(self):
        self.reading = False

    def resume_reading(self):
        self.reading = True

    def is_closing(self):
        return self.closed or self.aborted

    def close(self):
        self.closed = True

    def abort(self):
        self.aborted = True


class PlayedServer:
    """What connections share, with a clock that stands still until it is moved."""

    def __init__(self):
        running = asyncio.get_running_loop()
        self.now = 1000.0
        self.loop = self
        self.time = lambda: self.now
        self.create_task, self.call_soon = running.create_task, running.call_soon
        self.limits = LIMITS
        self.connections = set()
        self.draining = False
        self.settled = asyncio.Event()
        self.scratch = memoryview(bytearray(256 << 10))
        self.buffers = BufferPool()
        self.admission = BodyAdmission(self, 64 << 20, 64 << 20)
        self.app = self
        self.asked = []
        self.rejections = []
        self.answers = None  # instead of a whole answer

    def check_head(self, head):
        if head.path == "/missing":
            raise NotFound("nothing")

    def reject(self, error, head, request_id):
        self.rejections.append(error.code)
        return encode(ErrorResponse.of(error, ""))

    def connection_closed(self, connection):
        self.connections.discard(connection)
        self.settled.set()

    def flush_soon(self, connection):
        self.call_soon(connection.flush)

    async def handle(self, exchange):
        self.asked.append((exchange.head.path, bytes(exchange.body[: exchange.size])))
        if self.answers is not None:
            await self.answers(exchange)
        else:
            exchange.send(200, b"{}")


@pytest.fixture
async def server():
    return PlayedServer()


@pytest.fixture
async def client(server):
    return Client(server)


class Client:
    """The other end."""

    def __init__(self, server):
        self.server = server
        self.transport = PlayedTransport()
        self.connection = self.transport.protocol = HTTPConnection(server)
        self.connection.connection_made(self.transport)

    @property
    def got(self):
        return self.transport.written

    def send(self, data):
        while data:
            buffer = self.connection.get_buffer(-1)
            size = min(len(data), len(buffer))
            buffer[:size] = data[:size]
            self.connection.buffer_updated(size)
            data = data[size:]

    def pass_time(self, seconds):
        self.server.now += seconds
        if self.connection.deadline < self.server.now:
            self.connection.expire()


async def settle():
    for _ in range(5):
        await asyncio.sleep(0)


@pytest.mark.parametrize("how", ["chunked", "length"])
async def test_b52_body_stays_a_body_while_continue_is_unread(server, client, how):
    """Off: bytes that come while the transport is paused are read as a head."""
    length = b"Content-Length: 5\r\n"
    head = CHUNKED if how == "chunked" else POST + length
    body = b"5\r\nhello\r\n0\r\n\r\n" if how == "chunked" else b"hello"
    client.transport.full_after = b"100 Continue"
    client.send(head + b"Expect: 100-continue\r\n\r\n")
    assert client.connection.paused
    client.send(body)
    client.connection.resume_writing()
    await settle()
    assert server.asked == [("/a", b"hello")]
    assert not server.rejections
    assert client.got.startswith(CONTINUE + b"HTTP/1.1 200 ")


async def test_b52_http_1_0_gets_no_interim_answer(server, client):
    client.send(b"POST /a HTTP/1.0\r\nContent-Length: 2\r\nExpect: 100-continue\r\n\r\n")
    assert client.got == b""
    client.send(b"ok")
    await settle()
    assert client.got.startswith(b"HTTP/1.1 200 ")


async def test_a_body_keeps_its_deadline_while_continue_is_unread(client):
    client.transport.full_after = b"100 Continue"
    client.send(CHUNKED + b"Expect: 100-continue\r\n\r\n")
    client.connection.resume_writing()
    client.pass_time(LIMITS.body_seconds + 1)
    assert b" 408 " in client.got


@pytest.mark.parametrize("ends", [True, False])
async def test_a_connection_stays_open_after_its_exchange(server, client, ends):
    """Not when it has only begun: what came next would be read as part of that answer."""

    async def answer(exchange):
        stream = exchange.start(b"text/plain", b"begun")
        if ends:
            stream.end()

    server.answers = answer
    client.send(POST + b"Content-Length: 0\r\n\r\n")
    client.send(POST + b"Content-Length: 0\r\n\r\n")
    await settle()
    assert len(server.asked) == (2 if ends else 1)
    assert client.transport.closed is not ends
    assert client.got.count(b"HTTP/1.1 200 ") == len(server.asked)


async def test_bytes_written_after_the_end_are_dropped(server, client):
    async def answer(exchange):
        stream = exchange.start(b"text/plain", b"")
        late = stream.writer(b"<", b">")
        late(b"token")
        stream.write(b"")
        stream.end(b"last")
        late(b"late")
        stream.write(b"late")
        stream.end(b"late")
        with pytest.raises(RuntimeError):
            exchange.send(200, b"")
        with pytest.raises(RuntimeError):
            exchange.start(b"text/plain", b"")

    server.answers = answer
    client.send(POST + b"\r\n")
    await settle()
    body = client.got.partition(b"\r\n\r\n")[2]
    assert body == b"7\r\n<token>\r\n4\r\nlast\r\n0\r\n\r\n"
    assert not client.transport.closed


async def test_b51_half_close_during_a_stream_closes_behind_it(server, client):
    release = asyncio.Event()

    async def answer(exchange):
        stream = exchange.start(b"text/plain", b"first")
        await release.wait()
        stream.end()

    server.answers = answer
    client.send(POST + b"\r\n")
    await settle()
    assert client.connection.eof_received()
    assert not client.transport.closed
    release.set()
    await settle()
    assert client.got.endswith(b"0\r\n\r\n")
    assert client.transport.closed


async def test_b51_half_close_with_requests_ahead_answers_all_that_are_whole(server, client):
    client.send(POST + b"\r\n" + POST + b"\r\n" + POST[:-4])
    client.connection.eof_received()
    await settle()
    assert client.got.count(b"HTTP/1.1 200 ") == 2
    assert client.transport.closed


@pytest.mark.parametrize("whole", [True, False])
async def test_b51_half_close_before_an_answer_is_read_drops_nothing_sent_ahead(
    server, client, whole
):
    """Off: the request behind an answer that fills the transport is never answered."""
    client.transport.full_after = b"HTTP/1.1 200"
    client.send(POST + b"\r\n" + (POST + b"\r\n" if whole else POST[:-4]))
    await settle()
    assert client.connection.paused
    client.connection.eof_received()
    assert not client.transport.closed
    client.connection.resume_writing()
    await settle()
    assert client.got.count(b"HTTP/1.1 200 ") == (2 if whole else 1)
    assert client.got.count(b"connection: close") == (1 if whole else 0)
    assert client.transport.closed


async def test_half_close_of_http_1_0_is_answered_at_once_or_not_at_all(server, client):
    """It can't be asked whether it is still there; proxies that speak it leave this way."""
    client.send(b"GET /a HTTP/1.0\r\n\r\n")
    client.connection.eof_received()
    client.pass_time(0.5)
    await settle()
    assert client.got.startswith(b"HTTP/1.1 200 ")

    release = asyncio.Event()
    server.answers = lambda exchange: release.wait()
    slow = Client(server)
    slow.send(b"GET /a HTTP/1.0\r\n\r\n")
    slow.connection.eof_received()
    await settle()
    slow.pass_time(2)
    assert slow.transport.aborted
    assert b"100 Continue" not in slow.got
    slow.connection.connection_lost(None)


async def test_http_1_0_hears_that_it_may_go_on(client):
    client.send(b"GET /a HTTP/1.0\r\nConnection: keep-alive\r\n\r\n")
    await settle()
    assert b"\r\nconnection: keep-alive\r\n" in client.got
    assert not client.transport.closed


@pytest.mark.parametrize(
    "sent",
    [
        b"HEAD /missing HTTP/1.1\r\nHost: x\r\n\r\n", b"HEAD /a HTTP/1.1\r\n\r\n",
        b"HEAD /a HTTP/1.1\r\nHost: x\r\n" + b"A: b\r\n" * 200 + b"\r\n",
        b"HEAD /a HTTP/1.1\r\nHost: x\r\nA: " + b"b" * (70 << 10),
        b"HEAD /a HTTP/1.1\r\nHost: x\r\nContent-Length: 99999999999\r\n\r\n",
        b"HEAD /a HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nz\r\n",
    ],
)  # fmt: skip
async def test_b48_head_that_is_refused_has_no_body(server, client, sent):
    client.send(sent)
    head, _, body = client.got.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 4")
    assert b"content-length: 0" not in head
    assert body == b""
    get = Client(server)
    get.send(b"GET " + sent[5:])
    assert b'"error"' in get.got


@pytest.mark.parametrize("phase", ["closing", "refused", "kept"])
async def test_a_client_that_stops_reading_while_we_close_is_cut(server, client, phase):
    """Also one that reads a little and stops again."""
    close = b"Connection: close\r\n" if phase == "closing" else b""
    client.transport.full_after = b"HTTP/1.1 "
    client.send((POST + close + b"\r\n") if phase != "refused" else b"no HTTP\r\n\r\n")
    await settle()
    assert client.connection.paused
    client.connection.resume_writing()
    if phase == "kept":
        client.pass_time(IDLE_SECONDS + 1)
    assert client.connection._parser.phase is RequestPhase.DONE
    client.connection.pause_writing()
    client.connection.resume_writing()
    client.pass_time(LIMITS.write_seconds + 1)
    assert client.transport.aborted


async def test_a_client_that_never_reads_gets_no_further_request_answered(server, client):
    client.transport.full_after = b"HTTP/1.1 200"
    client.send(POST + b"\r\n" + POST + b"\r\n")
    await settle()
    assert len(server.asked) == 1
    client.pass_time(LIMITS.write_seconds + 1)
    assert client.transport.aborted


@pytest.mark.parametrize("waits", [False, True])
async def test_no_memory_for_a_body_is_a_503(server, client, monkeypatch, waits):
    """Mapped memory is refused in another way than that of the heap."""

    def no_memory(*_, **__):
        raise OSError(errno.ENOMEM, "Cannot allocate memory")

    monkeypatch.setattr(mmap, "mmap", no_memory)
    if waits:  # for bytes that another one releases
        other = Client(server).connection
        assert server.admission.admit(other, 60 << 20, "x")
    client.send(POST + b"Content-Length: %d\r\n\r\n" % (40 << 20))
    if waits:
        assert client.got == b""
        server.admission.release(other)
    head, _, body = client.got.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 503 ")
    assert b"retry-after: 1" in head
    assert json.loads(body)["error"]["code"] == "out_of_memory"
    assert not server.admission.bytes


async def test_no_memory_for_chunks_is_a_503(server, client, monkeypatch):
    class Full(bytearray):
        def __iadd__(self, data):
            raise MemoryError

    client.send(CHUNKED + b"\r\n")
    client.connection._parser._body = Full()
    client.send(b"3\r\nabc\r\n")
    assert client.got.startswith(b"HTTP/1.1 503 ")


async def test_bytes_that_come_while_a_body_waits_belong_to_that_body(server, client):
    other = Client(server).connection
    assert server.admission.admit(other, 64 << 20, "x")
    body = b"x" * (LARGE_BODY + 1)
    client.send(POST + b"Content-Length: %d\r\n\r\n" % len(body) + body[:100])
    assert not client.transport.reading
    client.send(body[100:200])  # which was on its way
    server.admission.release(other)
    assert client.transport.reading
    client.send(body[200:])
    await settle()
    assert server.asked == [("/a", body)]


async def test_many_requests_sent_ahead_stay_with_the_client(server, client):
    """Off (reading goes on after each answer): every answer lets 64 KiB more of requests in."""
    one = POST + b"X: " + b"y" * 2000 + b"\r\n\r\n"
    release = asyncio.Semaphore(0)

    async def answer(exchange):
        await release.acquire()
        exchange.send(200, b"{}")

    server.answers = answer
    sent = 0
    for _ in range(200):
        while client.transport.reading and sent < 4000:
            client.send(one * 20)
            sent += 20
        release.release()
        await settle()
    assert client.got.count(b"HTTP/1.1 200 ") == 200
    assert (sent - 200) * len(one) < (64 << 10) + 40 * len(one)
    for _ in range(sent):
        release.release()
    await settle()
    while client.transport.reading is False:
        await settle()
