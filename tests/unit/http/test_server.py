"""The server as a speaker of HTTP/1.1: one by one, unambiguous, never waiting for ever."""

import asyncio
import contextlib
import gc
import json
import socket
import struct
import sys
from asyncio.subprocess import PIPE

import psutil
import pytest

from triptych.api import app
from triptych.api.stream import BufferedChoice, EventStream, StreamedChoice
from triptych.config import Limits
from triptych.errors import EngineFailed
from triptych.http import bodies, connection, server
from triptych.http.exchange import HTTPExchange
from triptych.http.parser import RequestHead

CHAT = "/v1/chat/completions"
BODY = json.dumps(
    {"model": "tiny", "max_tokens": 3, "messages": [{"role": "user", "content": "Hi"}]}
).encode()


async def until(condition):
    async with asyncio.timeout(30):
        while not condition():
            await asyncio.sleep(0.005)


async def test_keep_alive_serves_one_after_the_other(web, wire):
    request, read = wire
    reader, writer = await web.connect()
    for _ in range(3):
        writer.write(request("POST", CHAT, BODY))
        assert (await read(reader)).status == 200
    writer.close()


async def test_pipelined_requests_are_answered_in_order(web, wire):
    request, read = wire
    reader, writer = await web.connect()
    paths = [CHAT, "/health", CHAT, "/v1/models", "/live"]
    parts = [request("POST", p, BODY) if p == CHAT else request("GET", p) for p in paths]
    writer.write(b"".join(parts))
    replies = [(await read(reader)).json for _ in paths]
    assert [r.get("object") or r["status"] for r in replies] == [
        "chat.completion", "ok", "chat.completion", "list", "ok",
    ]  # fmt: skip
    writer.close()


async def test_pipelined_request_waits_for_the_one_before(web, wire):
    request, read = wire
    web.pipeline.gate = asyncio.Event()
    reader, writer = await web.connect()
    writer.write(request("POST", CHAT, BODY) + request("POST", CHAT, BODY))
    await until(lambda: web.pipeline.works)
    await asyncio.sleep(0.02)
    assert len(web.pipeline.works) == 1
    web.pipeline.gate.set()
    assert [(await read(reader)).status for _ in range(2)] == [200, 200]
    writer.close()


async def test_much_sent_ahead_is_held_back_and_then_served(web, wire):
    request, read = wire
    web.pipeline.gate = asyncio.Event()
    reader, writer = await web.connect()
    big = request("POST", CHAT, BODY + b" " * 200_000)
    writer.write(request("POST", CHAT, BODY) + big * 10)
    await until(lambda: web.pipeline.works)
    await asyncio.sleep(0.05)
    (held,) = web.server.connections
    assert held._parser.unparsed <= connection.MAX_AHEAD_BYTES + (256 << 10)
    web.pipeline.gate.set()
    assert [(await read(reader)).status for _ in range(11)] == [200] * 11
    writer.close()


async def test_bytes_that_drip_in(web, wire):
    request, read = wire
    reader, writer = await web.connect()
    writer.transport.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    for byte in request("POST", CHAT, BODY):
        writer.write(bytes([byte]))
        await asyncio.sleep(0)
    assert (await read(reader)).status == 200
    writer.close()


@pytest.mark.parametrize("size", [1 << 20, (2 << 20) + 1, 7 << 20])
async def test_large_bodies_arrive_whole(web, size):
    text = b" " * (size - len(BODY)) + BODY
    assert (await web.ask(CHAT, text)).status == 200
    assert (await web.ask(CHAT, b"x" * size)).code == "invalid_json"


async def test_memory_follows_what_has_come(open_site):
    async with open_site() as web:
        before = psutil.Process().memory_info().rss
        _, writer = await web.connect()
        writer.write(b"POST %b HTTP/1.1\r\nHost: x\r\n" % CHAT.encode())
        writer.write(b"Content-Length: 60000000\r\n\r\n" + b"x" * 100)
        await until(lambda: any(c._parser.size for c in web.server.connections))
        (held,) = web.server.connections
        assert len(held._parser._body) == 60_000_000
        assert psutil.Process().memory_info().rss - before < 16 << 20
        writer.close()


async def test_buffers_are_used_again_and_keep_nothing(web):
    """A long body, then a shorter one in the same memory: only the shorter one is read."""
    long = BODY[:-2] + b'], "max_tokens": 1, "x": "' + b"y" * 300_000 + b'"}'
    for _ in range(3):
        assert (await web.ask(CHAT, long)).code in ("unsupported_parameter", "invalid_json")
        assert (await web.ask(CHAT, b" " * 100_000 + BODY)).status == 200
    assert len(web.server.buffers._free) == 1


def test_buffers_with_a_view_are_not_used_again():
    pool = bodies.BufferPool()
    buffer = pool.acquire(1 << 20)
    with memoryview(buffer):
        pool.release(buffer)
        assert pool.acquire(1 << 20) is not buffer
    pool.release(buffer)
    assert pool.acquire(1 << 20) is buffer
    assert len(buffer) == bodies.BUFFER_SIZE


async def test_continue(web, wire):
    request, read = wire
    reader, writer = await web.connect()
    head, _, _ = request("POST", CHAT, BODY, {"Expect": "100-continue"}).partition(b"\r\n\r\n")
    writer.write(head + b"\r\n\r\n")
    assert await reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
    writer.write(BODY)
    assert (await read(reader)).status == 200
    writer.close()


async def test_no_continue_for_what_is_refused(web, wire):
    request, _ = wire
    headers = {"Expect": "100-continue", "Content-Length": str(1 << 40)}
    assert (await web.raw(request("POST", CHAT, b"", headers))).status == 413


SMUGGLED = [
    b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n",
    b"Transfer-Encoding: chunked\r\nContent-Length: 5\r\n",
    b"Content-Length: 5\r\nContent-Length: 5\r\n",
    b"Content-Length: 5\r\nContent-Length: 6\r\n",
    b"Content-Length: 5, 5\r\n",
    b"Content-Length: +5\r\n",
    b"Content-Length: 0x5\r\n",
    b"Content-Length: -5\r\n",
    b"Content-Length:\r\n",
    b"Content-Length : 5\r\n",
    b"Content-Length: 99999999999999999999999999\r\n",
    b"Transfer-Encoding: xchunked\r\n",
    b"Transfer-Encoding: gzip, chunked\r\n",
    b"Transfer-Encoding: chunked, identity\r\n",
    b"Transfer-Encoding: chunked\r\nTransfer-Encoding: chunked\r\n",
    b"Transfer-Encoding:\x0bchunked\r\n",
    b"X: a\r\n Transfer-Encoding: chunked\r\n",
    b"X: a\x00b\r\n",
    b"X: a\rTransfer-Encoding: chunked\r\n",
    b"X: a\nTransfer-Encoding: chunked\r\n",
]


@pytest.mark.parametrize("lines", SMUGGLED)
async def test_smuggling_is_refused_and_cut(web, lines):
    hidden = b"GET /v1/models HTTP/1.1\r\nHost: x\r\n\r\n"
    reader, writer = await web.connect()
    writer.write(b"POST /tokenize HTTP/1.1\r\nHost: x\r\n" + lines + b"\r\n0\r\n\r\n" + hidden)
    writer.write_eof()
    answer = await asyncio.wait_for(reader.read(), 5)
    assert answer.startswith(b"HTTP/1.1 400 ")
    assert answer.count(b"content-length") == 1
    assert b"connection: close" in answer
    writer.close()


@pytest.mark.parametrize(
    "line", [b"GET / HTTP/2.0", b"GET /", b"FOO / HTTP/1.1", b"\x16\x03\x01", b"GET /a b HTTP/1.1"]
)
async def test_bad_request_lines(web, line):
    reply = await web.raw(line + b"\r\nHost: x\r\n\r\n")
    assert (reply.status, reply.code) == (400, "invalid_http")


async def test_b50_request_behind_a_chunked_body_is_the_next_one(web, wire):
    """All in one packet. Off: the parser of chunks goes on behind their end."""
    request, read = wire
    head = b"POST /v1/media HTTP/1.1\r\nHost: x\r\n"
    reader, writer = await web.connect()
    writer.write(
        head + b"Transfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n0\r\n\r\n"
        + head + b"Content-Length: 6\r\n\r\ndefghi"
        + head + b"Transfer-Encoding: chunked\r\n\r\n1\r\nj\r\n0\r\n\r\n"
        + request("GET", "/live")
    )  # fmt: skip
    assert [(await read(reader)).json["bytes"] for _ in range(3)] == [3, 6, 1]
    assert (await read(reader)).json == {"status": "ok"}
    writer.close()


async def test_chunked_bodies_keep_the_connection(web, wire):
    _, read = wire
    reader, writer = await web.connect()
    head = b"POST %b HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n" % CHAT.encode()
    for trailer in (b"", b"X-Sum: 1\r\nAuthorization: x\r\n"):
        writer.write(head + b"%x;ext=1\r\n%b\r\n0\r\n" % (len(BODY), BODY) + trailer + b"\r\n")
        assert (await read(reader)).status == 200
    writer.close()


async def test_endless_trailer(web):
    head = b"POST %b HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n" % CHAT.encode()
    reply = await web.raw(head + b"1\r\na\r\n0\r\nX: " + b"a" * (1 << 20))
    assert reply.status == 431


@pytest.mark.parametrize(
    "chunk", [b"z\r\n", b"1\nx\n", b"-1\r\n", b"1\r\nabc\r\n", b"f" * 17 + b"\r\n"]
)
async def test_bad_chunks(web, chunk):
    head = b"POST %b HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n" % CHAT.encode()
    reply = await web.raw(head + chunk)
    assert (reply.status, reply.code) == (400, "invalid_http")


async def test_old_clients_get_an_answer_that_ends_with_the_connection(web):
    body = BODY[:-1] + b', "stream": true}'
    head = b"POST %b HTTP/1.0\r\nContent-Length: %d\r\n\r\n" % (CHAT.encode(), len(body))
    reply = await web.raw(head + body)
    assert "transfer-encoding" not in reply.headers
    assert reply.headers["connection"] == "close"
    assert reply.events[-1] == "[DONE]"


async def test_connection_close_is_followed(web, wire):
    request, _ = wire
    reader, writer = await web.connect()
    writer.write(request("GET", "/live", b"", {"Connection": "close"}))
    answer = await asyncio.wait_for(reader.read(), 5)
    assert b"connection: close" in answer
    writer.close()


async def test_head_and_options(web):
    reply = await web.ask("/health", method="OPTIONS")
    assert (reply.status, reply.headers["allow"]) == (200, "get, options, head")
    reader, writer = await web.connect()
    writer.write(b"HEAD /health HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
    answer = await asyncio.wait_for(reader.read(), 5)
    assert answer.endswith(b"\r\n\r\n")
    assert b"content-length: 15\r\n" in answer
    writer.close()


async def test_other_methods(web):
    reply = await web.ask("/health", b"", "POST")
    assert (reply.status, reply.code) == (405, "method_not_allowed")
    assert reply.headers["allow"] == "get, options, head"


async def test_upgrade_is_refused(web, wire):
    request, read = wire
    reader, writer = await web.connect()
    for _ in range(2):
        writer.write(request("GET", "/live", b"", {"Connection": "upgrade", "Upgrade": "h2c"}))
        assert (await read(reader)).status == 200
    writer.close()


async def test_upgrade_is_refused_with_a_body_too(web, wire):
    request, read = wire
    reader, writer = await web.connect()
    offer = {"Connection": "Upgrade, HTTP2-Settings", "Upgrade": "h2c", "HTTP2-Settings": "AAMA"}
    for _ in range(2):
        writer.write(request("POST", CHAT, BODY, offer))
        assert (await read(reader)).status == 200
        chunked = {"Content-Length": None, "Transfer-Encoding": "chunked"}
        chunk = b"%x\r\n%b\r\n0\r\n\r\n" % (len(BODY), BODY)
        writer.write(request("POST", CHAT, b"", offer | chunked) + chunk)
        assert (await read(reader)).status == 200
    writer.close()


@pytest.mark.parametrize(
    ("target", "status"),
    [
        ("http://x/health", 200), ("HTTP://x:80/health?a=b", 200), ("https://x/live", 200),
        ("http://x/nothing", 404), ("http://x", 404), ("http://x/http://x/health", 404),
    ],
)  # fmt: skip
async def test_targets_may_be_absolute(web, target, status):
    assert (await web.ask(target)).status == status


@pytest.mark.parametrize("stream", [False, True])
async def test_client_that_only_sends_no_more_is_answered(web, wire, stream):
    """More than one request, and the first of them takes its time."""
    request, read = wire
    web.pipeline.gate = asyncio.Event()
    reader, writer = await web.connect()
    body = json.dumps(json.loads(BODY) | {"stream": stream}).encode()
    writer.write(request("POST", CHAT, body) + request("GET", "/live"))
    writer.write_eof()
    await until(lambda: web.pipeline.works and any(c._eof for c in web.server.connections))
    web.pipeline.gate.set()
    first = await read(reader)
    assert first.status == 200
    assert first.events[-1] == "[DONE]" if stream else first.json["choices"]
    assert (await read(reader)).json == {"status": "ok"}
    assert await asyncio.wait_for(reader.read(), 5) == b""
    writer.close()


async def test_a_request_that_can_never_be_complete_is_ended(web, wire):
    request, read = wire
    reader, writer = await web.connect()
    writer.write(request("GET", "/live") + request("POST", CHAT, BODY)[:-5])
    writer.write_eof()
    assert (await read(reader)).status == 200
    assert await asyncio.wait_for(reader.read(), 5) == b""
    writer.close()


async def test_a_client_that_waits_long_gets_100_continue(open_site, wire):
    request, read = wire
    async with open_site(QUICK) as web:
        web.pipeline.gate = asyncio.Event()
        reader, writer = await web.connect()
        writer.write(request("POST", CHAT, BODY))
        writer.write_eof()
        for _ in range(2):
            wait = reader.readuntil(b"\r\n\r\n")
            assert await asyncio.wait_for(wait, 5) == b"HTTP/1.1 100 Continue\r\n\r\n"
        web.pipeline.gate.set()
        reply = await read(reader)
        while reply.status == 100:
            reply = await read(reader)
        assert reply.status == 200
        writer.close()


QUICK = Limits(header_seconds=0.1, body_seconds=0.1, write_seconds=0.3)


@pytest.mark.parametrize("sent", [b"", b"GET /hea", b"POST /tokenize HTTP/1.1\r\nX: y\r\n"])
async def test_slow_heads_are_cut(open_site, sent):
    async with open_site(QUICK) as web:
        reader, writer = await web.connect()
        writer.write(sent)
        answer = await asyncio.wait_for(reader.read(), 5)
        assert answer.startswith(b"HTTP/1.1 408 ") if sent else answer == b""
        writer.close()


async def test_heads_that_drip_are_cut(open_site):
    async with open_site(QUICK) as web:
        reader, writer = await web.connect()
        answer = asyncio.ensure_future(reader.read())
        async with asyncio.timeout(30):
            while not answer.done():
                writer.write(b"GET /"[:1])
                await asyncio.sleep(0.01)
        assert answer.result().startswith(b"HTTP/1.1 408 ")
        writer.close()


@pytest.mark.parametrize("how", [b"Content-Length: 100", b"Transfer-Encoding: chunked"])
async def test_slow_bodies_are_cut(open_site, how):
    async with open_site(QUICK) as web:
        reader, writer = await web.connect()
        writer.write(b"POST /tokenize HTTP/1.1\r\nHost: x\r\n" + how + b"\r\n\r\n1\r\n")
        answer = await asyncio.wait_for(reader.read(), 5)
        assert answer.startswith(b"HTTP/1.1 408 ")
        assert b"request_timeout" in answer
        writer.close()


async def test_refusal_is_readable_while_the_client_still_sends(web):
    """The socket is not reset under the answer."""
    reader, writer = await web.connect()
    writer.write(b"POST %b HTTP/1.1\r\nHost: x\r\n" % CHAT.encode())
    writer.write(b"Content-Length: 10000000000\r\n\r\n")
    writer.write(bytes(8 << 20))
    await writer.drain()
    await asyncio.sleep(0.05)
    answer = await asyncio.wait_for(reader.read(), 5)
    assert answer.startswith(b"HTTP/1.1 413 ")
    writer.close()


async def stalled(web, **fields):
    """A client that asks for an endless stream and does not read it."""
    web.pipeline.endless = True
    sock = socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    sock.setblocking(False)
    loop = asyncio.get_running_loop()
    await loop.sock_connect(sock, ("127.0.0.1", web.server.port))
    body = json.dumps(json.loads(BODY) | {"stream": True} | fields).encode()
    head = b"POST %b HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % (CHAT.encode(), len(body))
    await loop.sock_sendall(sock, head + body)
    return sock


async def test_slow_reader_pauses_the_source_and_resumes_it(web):
    sock = await stalled(web)
    loop = asyncio.get_running_loop()
    await until(lambda: web.pipeline.paused == 1)
    (held,) = web.server.connections
    assert held._transport.get_write_buffer_size() <= connection.MAX_UNREAD_BYTES
    async with asyncio.timeout(30):
        while web.pipeline.resumed == 0:
            await loop.sock_recv(sock, 1 << 16)
    sock.close()
    await until(lambda: web.pipeline.cancelled)


async def test_bytes_in_flight_at_a_refusal_do_not_cut_the_connection(web):
    """A pause reaches the workers late: what they send until then is buffered, for every stream."""
    sock = await stalled(web, n=3, return_token_ids=True)
    await until(lambda: web.pipeline.paused >= 3)
    (held,) = web.server.connections
    for _ in range(3):
        held.write_soon(b"x" * (connection.MAX_UNREAD_BYTES - 4096))
        held.flush()
    await asyncio.sleep(0.02)
    assert not web.pipeline.cancelled
    held.write_soon(b"x" * (8 * connection.MAX_UNREAD_BYTES))
    held.flush()
    await until(lambda: len(web.pipeline.cancelled) == 3)
    sock.close()


async def test_several_choices_pause_together(web):
    sock = await stalled(web, n=3)
    await until(lambda: web.pipeline.paused >= 3)
    sock.close()
    await until(lambda: len(web.pipeline.cancelled) == 3)


async def test_reader_that_never_reads_is_cut(open_site):
    async with open_site(QUICK) as web:
        sock = await stalled(web)
        await until(lambda: web.pipeline.paused == 1)
        await until(lambda: web.pipeline.cancelled)
        assert not web.server.connections
        sock.close()


async def test_source_that_pours_on_is_bounded(web):
    """Even when no worker pauses, no more than the limit is buffered for a client."""
    sock = await stalled(web)
    await until(lambda: web.pipeline.paused == 1)
    web.pipeline.resumed = 1 << 30
    await until(lambda: web.pipeline.cancelled)
    sock.close()


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("reset", [False, True])
async def test_disconnect_cancels_the_run(web, wire, stream, reset):
    request, _ = wire
    web.pipeline.endless = True
    _, writer = await web.connect()
    body = json.dumps(json.loads(BODY) | {"stream": stream, "n": 2}).encode()
    writer.write(request("POST", CHAT, body))
    await until(lambda: len(web.pipeline.works) == 2)
    if reset:
        linger = struct.pack("ii", 1, 0)
        sock = writer.get_extra_info("socket")
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
    writer.close()
    await until(lambda: len(web.pipeline.cancelled) == 2)
    await until(lambda: web.app.metrics.in_flight == 0)
    assert web.app.metrics.cancelled == 1
    web.pipeline.endless = False
    assert (await web.chat()).status == 200


async def test_drain_lets_streams_finish_and_refuses_new_work(web, wire):
    request, read = wire
    web.pipeline.gate = asyncio.Event()
    reader, writer = await web.connect()
    idle, _ = await web.connect()
    writer.write(request("POST", CHAT, BODY[:-1] + b', "stream": true}'))
    await until(lambda: web.pipeline.works)
    draining = asyncio.ensure_future(web.server.drain(5))
    assert await asyncio.wait_for(idle.read(), 5) == b""
    assert (await web.ask("/health")).status == 503
    assert (await web.ask("/live")).status == 200
    refused = await web.chat()
    assert (refused.status, refused.code) == (503, "draining")
    assert refused.headers["retry-after"]
    assert refused.headers["connection"] == "close"
    web.pipeline.gate.set()
    assert (await read(reader)).events[-1] == "[DONE]"
    await asyncio.wait_for(draining, 5)
    with pytest.raises(ConnectionError):
        await web.connect()
    writer.close()


async def test_drain_gives_up_in_the_end(web, wire):
    request, read = wire
    web.pipeline.endless = True
    reader, writer = await web.connect()
    writer.write(request("POST", CHAT, BODY))
    await until(lambda: web.pipeline.works)
    await asyncio.wait_for(web.server.drain(0.05), 5)
    assert len(web.pipeline.cancelled) == 1
    told = await read(reader)
    assert (told.status, told.code) == (503, "draining")
    writer.close()


async def test_a_stream_that_a_drain_cuts_ends_with_an_error(web, wire):
    request, _ = wire
    web.pipeline.endless = True
    reader, writer = await web.connect()
    writer.write(request("POST", CHAT, BODY[:-1] + b', "stream": true}'))
    await reader.readuntil(b"data: ")
    await asyncio.wait_for(web.server.drain(0.05), 5)
    rest = await asyncio.wait_for(reader.read(), 5)
    assert b'"code":"draining"' in rest
    assert b"[DONE]" not in rest
    assert len(web.pipeline.cancelled) == 1
    writer.close()


async def test_tokens_are_sent_at_once(web):
    (listening,) = web.server._acceptor.sockets
    _, writer = await web.connect()
    await until(lambda: web.server.connections)
    (held,) = web.server.connections
    sock = held._transport.get_extra_info("socket")
    assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
    assert listening.getsockname()[0] == "127.0.0.1"
    writer.close()


@pytest.mark.parametrize("how", ["whole", "chunked", "refused"])
async def test_requests_leave_no_cycles(web, wire, how):
    """What a request held goes with it, and does not wait for the collector."""
    request, read = wire
    head = b"POST %b HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n" % CHAT.encode()
    data = {
        "whole": request("POST", CHAT, BODY),
        "chunked": head + b"%x\r\n%b\r\n0\r\n\r\n" % (len(BODY), BODY),
        "refused": request("POST", CHAT, b"{}"),
    }[how]
    reader, writer = await web.connect()
    for warm in (True, False):
        for _ in range(5):
            writer.write(data)
            await read(reader)
        if warm:
            gc.collect()
            gc.disable()
    assert not in_cycles() & {
        RequestHead.__name__,
        HTTPExchange.__name__,
        BufferedChoice.__name__,
        "HttpRequestParser",
        "bytearray",
        "Work",
    }
    writer.close()


@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("how", ["left", "failed"])
async def test_requests_that_end_early_leave_no_cycles(web, wire, n, how):
    """Off: HTTPConnection._answer lets a cancel through, or the tasks and the error of Together
    hold what they ended with, or EventStream its own first method."""
    request, read = wire
    web.pipeline.gate, web.pipeline.error = asyncio.Event(), EngineFailed("on purpose")
    reader, writer = await web.connect()
    body = json.dumps(json.loads(BODY) | {"stream": True, "n": n}).encode()
    writer.write(request("POST", CHAT, body))
    await until(lambda: len(web.pipeline.works) == n)
    gc.collect()
    gc.disable()
    if how == "left":
        writer.transport.abort()
        await until(lambda: len(web.pipeline.cancelled) == n)
    else:
        web.pipeline.gate.set()
        assert (await read(reader)).code == "engine_failed"
    web.pipeline.error = None  # which would be seen to hold where it was raised
    await until(lambda: not web.app.metrics.in_flight)
    await asyncio.sleep(0)
    assert not in_cycles() & {
        "Task",
        HTTPExchange.__name__,
        StreamedChoice.__name__,
        EventStream.__name__,
        RequestHead.__name__,
    }
    writer.close()


def in_cycles():
    """Kinds of what only the collector finds; it was off until here."""
    try:
        gc.set_debug(gc.DEBUG_SAVEALL)
        gc.collect()
        return {type(thing).__name__ for thing in gc.garbage}
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()


FEW = """
import asyncio, resource, sys, uvloop
from triptych.api.responses import ErrorResponse, encode
from triptych.config import Limits
from triptych.http.server import HTTPServer

resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))

class App:
    reject = staticmethod(lambda error, head, id: encode(ErrorResponse.of(error, id)))

    def check_head(self, head):
        pass

    async def handle(self, exchange):
        exchange.send(200, b"{}")

async def main():
    server = HTTPServer(Limits(), App())
    await server.start("127.0.0.1", 0)
    print(server.port, flush=True)
    await asyncio.Event().wait()

uvloop.run(main())
"""


@contextlib.asynccontextmanager
async def few_descriptors():
    """The port of a server that may have 64 descriptors; what it wrote to stderr, once it ended."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", FEW, stdout=PIPE, stderr=PIPE
    )
    told = bytearray()
    try:
        yield int(await process.stdout.readline()), told
    finally:
        process.terminate()
        told += (await process.communicate())[1]


async def test_f23_with_few_descriptors_connections_get_a_503(wire):
    """All of 200 are answered, none is closed without a word, and later ones are served."""
    request, read = wire
    asking = request("GET", "/live")
    async with few_descriptors() as (port, told):
        held, refused = [], []
        for _ in range(200):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(asking)
            reply = await read(reader)
            if reply.status == 200:
                held.append((reader, writer))
                continue
            refused.append(reply)
            writer.close()
        assert len(held) > 30
        assert {(r.status, r.code) for r in refused} == {(503, "service_unavailable")}
        assert refused[0].headers["retry-after"]
        for reader, writer in held:  # which go on
            writer.write(asking)
            assert (await read(reader)).status == 200
            writer.close()

        async def served():
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(asking)
            status = (await read(reader)).status
            writer.close()
            return status

        async with asyncio.timeout(30):
            while await served() != 200:
                await asyncio.sleep(0.01)
    assert b"Traceback" not in told
    assert told.count(b"refused") < 10  # lines, of which none is for each connection


async def test_f23_connections_that_come_at_once_all_get_an_answer(wire):
    """Those that are refused do not use up the reserve: others wait for their 503, and one that
    asks for nothing gets it too."""
    request, read = wire
    held = []

    async with few_descriptors() as (port, _):

        async def ask(sent):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(sent)
            status = (await read(reader)).status
            if status == 200:
                held.append(writer)
            else:
                writer.close()
            return status

        asking = request("GET", "/live")
        found = await asyncio.gather(*(ask(asking) for _ in range(150)))
        assert (set(found), len(held) > 30) == ({200, 503}, True)
        assert set(await asyncio.gather(*(ask(b"") for _ in range(4)))) == {503}
        for writer in held:
            writer.close()


async def test_a_client_that_does_not_read_does_not_hold_up_the_end(open_site):
    """Neither a drain, once its time is over, nor a close."""
    async with open_site() as web:
        sock = await stalled(web)
        await until(lambda: web.pipeline.paused == 1)
        await asyncio.wait_for(web.server.drain(0.05), 30)
        await until(lambda: not web.server.connections)
        assert len(web.pipeline.cancelled) == 1
        sock.close()


async def test_an_answer_that_is_being_read_is_read_to_its_end_in_a_drain(web, wire):
    request, _ = wire

    async def much(exchange):
        exchange.send(200, bytes(8 << 20))

    web.app.handle = much
    sock = socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    sock.setblocking(False)
    loop = asyncio.get_running_loop()
    await loop.sock_connect(sock, ("127.0.0.1", web.server.port))
    await loop.sock_sendall(sock, request("GET", "/live"))
    await until(lambda: any(c.idle() and c.busy() for c in web.server.connections))
    draining = asyncio.ensure_future(web.server.drain(30))
    got = b""
    async with asyncio.timeout(30):
        while data := await loop.sock_recv(sock, 1 << 16):
            got += data
            await asyncio.sleep(0)
    head, _, rest = got.partition(b"\r\n\r\n")
    assert len(rest) == int(head.split(b"content-length: ")[1].split(b"\r\n")[0])
    await asyncio.wait_for(draining, 30)
    sock.close()


async def test_a_handler_that_ignores_its_cancel_does_not_delay_the_stop(
    open_site, wire, monkeypatch
):
    request, _ = wire
    released = asyncio.Event()

    async def stubborn(exchange):
        while not released.is_set():
            with contextlib.suppress(asyncio.CancelledError):
                await released.wait()

    async with open_site() as web:
        web.app.handle = stubborn
        reader, writer = await web.connect()
        writer.write(request("GET", "/live"))
        await until(lambda: any(c.task for c in web.server.connections))
        try:
            await asyncio.wait_for(web.server.close(), 20)
        finally:
            released.set()
        assert await asyncio.wait_for(reader.read(), 30) == b""
        writer.close()


async def test_no_memory_while_answering_is_a_503(web, monkeypatch):
    def no_memory(*_):
        raise MemoryError

    monkeypatch.setattr(app, "decode_request", no_memory)
    reply = await web.chat()
    assert (reply.status, reply.code) == (503, "out_of_memory")
    assert reply.headers["retry-after"]


async def test_memory_of_large_bodies_is_released_after_them(web, monkeypatch):
    given = []
    monkeypatch.setattr(server, "trim_allocator", lambda: given.append(web.server.admission.bytes))
    monkeypatch.setattr(server, "TRIM_SECONDS", 0.01)
    assert (await web.ask(CHAT, b" " * (1 << 20) + BODY)).status == 200
    assert web.server.buffers._free
    await until(lambda: given)
    assert given == [0]
    assert not web.server.buffers._free
    assert (await web.chat()).status == 200  # not large: nothing to give back
    web.server._trim_memory(web.server.loop.time() + 99)
    assert given == [0]
