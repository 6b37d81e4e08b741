"""Fetching media from URLs and servers that mean ill.

OPEN stands for an address of the open network; 127.0.0.1 and the rest are closed as ever.
"""

import asyncio
import gzip
import threading
import tracemalloc
import zlib
from contextlib import suppress

import pytest

from support.fetching import LIMIT, Fetching, settings
from support.hostile_servers import Sent
from support.origin import OPEN, NamedGate, Origin, moved, reply
from triptych.errors import (
    MediaFetchFailed,
    MediaFetchTimeout,
    MediaTooLarge,
    MediaURLBlocked,
    UnsupportedURLScheme,
)
from triptych.sources import fetch
from triptych.sources.address import MAX_LOOKUPS
from triptych.sources.fetch_channel import BodyFile
from triptych.sources.http_response import DECOMPRESS_STEP, BodyDecompressor

B17 = [
    "http://127.1:{}/",
    "http://127.0.0.1:{}/",
    "http://169.254.169.254/latest/meta-data/",
    "http://[::1]:{}/",
    "http://[::ffff:127.0.0.1]:{}/",
    "http://[::ffff:7f00:1]:{}/",
    "http://[::127.0.0.1]:{}/",
    "http://[64:ff9b::7f00:1]:{}/",
    "http://[::]:{}/",
    "http://2130706433:{}/",
    "http://0x7f000001:{}/",
    "http://0177.0.0.1:{}/",
    "http://127.0.0.1.:{}/",
    "http://\uff11\uff12\uff17.0.0.1:{}/",
    "http://127\u30020\u30020\u30021:{}/",
    "http://0:{}/",
    "http://0.0.0.0:{}/",
    "http://localhost:{}/",
    "http://localhost.:{}/",
    "http://LOCALHOST:{}/",
    "http://a.localhost:{}/",
    "http://named.test:{}/",
    "http://named.test.:{}/",
    "http://metadata.test/",
]
CLOSED = {
    "named.test": [["127.0.0.1"]],
    "metadata.test": [["169.254.169.254"]],
    "localhost": [["127.0.0.1"]],
    "a.localhost": [["127.0.0.1"]],
}


@pytest.mark.parametrize("url", B17)
async def test_b17_closed_addresses_are_blocked_and_not_connected_to(url):
    async with Origin({"/": reply(200, b"hidden")}, "127.0.0.1") as closed:
        async with Fetching(gate=NamedGate(CLOSED)) as f:
            await f.refused(MediaURLBlocked, url.format(closed.port))
            assert f.gate.opened == []
            assert f.count("fetch_failures") == 1
        assert closed.accepts == 0


@pytest.mark.parametrize("url", B17)
async def test_b18_a_redirect_to_a_closed_address_is_blocked_and_not_followed(url):
    async with Origin({"/": reply(200, b"hidden")}, "127.0.0.1") as closed:
        target = url.format(closed.port)
        async with Origin({}) as origin, Fetching(gate=NamedGate(CLOSED)) as f:
            origin.routes["/a"] = moved("/b")
            origin.routes["/b"] = moved(target)
            await f.refused(MediaURLBlocked, origin.url("/a"))
            assert set(f.gate.opened) == {OPEN}
            assert len(origin.asked) == 2
        assert closed.accepts == 0


async def test_b18_a_redirect_to_another_scheme_is_not_followed():
    async with Origin({}) as origin, Fetching() as f:
        for to, error in (
            ("file:///etc/passwd", UnsupportedURLScheme),
            ("ftp://ok.test/", UnsupportedURLScheme),
            ("http://ok\\@127.0.0.1/", MediaURLBlocked),
            ("http://user@ok.test/", MediaURLBlocked),
            ("/b c", MediaURLBlocked),
        ):
            origin.routes["/a"] = moved(to)
            await f.refused(error, origin.url("/a"))


async def test_b19_a_name_that_is_rebound_is_blocked_at_the_connection():
    answers = [[OPEN], ["127.0.0.1"]]
    async with Origin({"/": reply(200, b"hidden")}, "127.0.0.1") as closed:
        async with Fetching(gate=NamedGate({"rebound.test": answers})) as f:
            url = f"http://rebound.test:{closed.port}/"
            await f.refused(MediaFetchFailed, url)  # OPEN, where nothing listens at that port
            await f.refused(MediaURLBlocked, url)
            assert f.gate.opened == [OPEN]
        assert closed.accepts == 0


class Rebinding(NamedGate):
    """What was looked at is not what is connected to: as if resolving and checking were apart."""

    def __init__(self, *addresses):
        super().__init__()
        self._addresses = addresses

    async def resolve(self, host, port, tenant=""):
        (found,) = await super().resolve(host, port, tenant)
        return [(*found[:4], (address, port)) for address in self._addresses]


@pytest.mark.parametrize(
    ("addresses", "error"),
    [
        (["127.0.0.1"], MediaURLBlocked),
        (["127.0.0.1", "127.0.0.1"], MediaURLBlocked),
        (["127.0.0.1", OPEN], MediaFetchFailed),
        ([OPEN, "127.0.0.1"], MediaURLBlocked),
    ],
)
async def test_b19_an_address_that_changes_after_the_check_is_not_connected_to(addresses, error):
    """It is the socket that is refused, whatever resolver and checks said before."""
    async with Origin({"/": reply(200, b"hidden")}, "127.0.0.1") as closed:
        async with Fetching(gate=Rebinding(*addresses)) as f:
            await f.refused(error, f"http://ok.test:{closed.port}/")  # nothing listens at OPEN
            assert set(f.gate.opened) <= {OPEN}
        assert closed.accepts == 0


@pytest.mark.parametrize(
    "answer", [[OPEN, "127.0.0.1"], ["127.0.0.1", OPEN], [OPEN, "::1"], [OPEN, "::ffff:127.0.0.1"]]
)
async def test_b19_mixed_records_are_blocked(answer):
    async with Origin({"/": reply(200, b"hidden")}, "127.0.0.1") as closed:
        async with Origin({"/": reply(200, b"fine")}) as origin:
            async with Fetching(gate=NamedGate({"mixed.test": [answer]})) as f:
                for port in (closed.port, origin.port):
                    await f.refused(MediaURLBlocked, f"http://mixed.test:{port}/")
                assert f.gate.opened == []
            assert origin.accepts == 0
        assert closed.accepts == 0


@pytest.mark.parametrize(
    "url",
    [
        "http://ok.test\\@127.0.0.1:{}/",
        "http://ok.test@127.0.0.1:{}/",
        "http://ok.test:80@127.0.0.1:{}/",
        "http://127.0.0.1:{}\\.ok.test/",
        "http://127.0.0.1:{}\t.ok.test/",
        "http://127.0.0.1:{}%2f.ok.test/",
        "http:127.0.0.1:{}/",
        "http:///127.0.0.1:{}/",
    ],
)
async def test_b20_parser_disagreements_are_blocked(url):
    async with Origin({"/": reply(200, b"hidden")}, "127.0.0.1") as closed:
        async with Fetching() as f:
            await f.refused(MediaURLBlocked, url.format(closed.port))
            assert f.gate.opened == f.gate.looked_up == []
        assert closed.accepts == 0


async def test_b21_five_redirects_and_no_more():
    routes = {f"/{n}": moved(f"/{n + 1}") for n in range(6)} | {"/6": reply(200, b"end")}
    async with Origin(routes) as origin, Fetching() as f:
        assert await f.get(origin.url("/1")) == b"end"
        await f.refused(MediaFetchFailed, origin.url("/0"))
        assert [asked.path for asked in origin.asked].count("/6") == 1
        origin.routes["/loop"] = moved("/loop")
        await f.refused(MediaFetchFailed, origin.url("/loop"))


@pytest.mark.parametrize("status", [201, 204, 206, 300, 304, 400, 401, 403, 404, 429, 500, 503])
async def test_any_other_status_is_a_failure_that_names_it(status):
    hidden = reply(status, b"" if status in (204, 304) else b"hidden", X_Hidden="hidden")
    async with Origin({"/a": hidden}) as origin, Fetching() as f:
        error = await f.refused(MediaFetchFailed, origin.url("/a"))
        assert str(status) in error.message


async def test_a_server_that_is_away_or_speaks_otherwise_is_a_failure():
    async def shut(writer, asked):
        writer.close()

    routes = {
        "/nonsense": b"220 hidden ESMTP\r\n\r\n",
        "/shut": shut,
        "/header": b"HTTP/1.1 200 OK\r\nX: " + b"x" * 100_000 + b"\r\n\r\n",
        "/moved": reply(302),
        "/chunks": b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nhidden\r\n",
        "/packed": reply(200, b"hidden", Content_Encoding="br"),
        "/wrong": reply(200, b"hidden", Content_Encoding="gzip"),
        "/broken": reply(200, gzip.compress(b"x" * 100)[:-9], Content_Encoding="gzip"),
    }
    async with Origin(routes) as origin, Fetching() as f:
        for path in routes:
            await f.refused(MediaFetchFailed, origin.url(path))
        await f.refused(MediaFetchFailed, "http://ok.test:1/")
        await f.refused(MediaFetchFailed, "http://unknown.test/")


async def test_b23_a_dripping_server_is_left_at_the_total_deadline():
    async def drip(writer, asked):
        writer.write(reply(200, Content_Length="50000"))
        while not writer.is_closing():
            writer.write(b"x")
            await writer.drain()
            await asyncio.sleep(0.02)

    async def drip_head(writer, asked):
        writer.write(b"HTTP/1.1 200 OK\r\n")
        while not writer.is_closing():
            writer.write(b"X: y\r\n")
            await asyncio.sleep(0.02)

    async def silent(writer, asked):
        await asyncio.sleep(60)

    async def slow_redirect(writer, asked):
        await asyncio.sleep(0.1)
        writer.write(moved("/slow"))

    routes = {"/drip": drip, "/head": drip_head, "/silent": silent, "/slow": slow_redirect}
    async with Origin(routes) as origin, Fetching(settings(seconds=0.25)) as f:
        for path in routes:
            await f.refused(MediaFetchTimeout, origin.url(path))
        await origin.until_left()
        assert f.count("fetch_failures") == 4


async def test_b23_a_slow_name_server_counts_too():
    go = threading.Event()

    class Slow(NamedGate):
        def look_up(self, host, port):
            go.wait(10)
            return []

    async with Fetching(settings(seconds=0.05), Slow()) as f:
        await f.refused(MediaFetchTimeout, "http://ok.test/")
        go.set()


async def test_b23_one_tenants_slow_names_stop_no_other_from_fetching():
    go = threading.Event()

    class Silent(NamedGate):
        def look_up(self, host, port):
            assert host == "ok.test" or go.wait(10)
            return super().look_up("ok.test", port)

    async with (
        Origin({"/a": reply(200, b"a")}) as origin,
        Fetching(settings(seconds=1.0), Silent()) as f,
    ):
        urls = [origin.url("/a", f"silent{i}.test") for i in range(2 * MAX_LOOKUPS)]
        slow = [asyncio.create_task(f.get(url, "slow\n")) for url in urls]
        await asyncio.sleep(0.05)
        assert await f.get(origin.url("/a"), "other\n") == b"a"
        assert not any(task.done() for task in slow)
        errors = await asyncio.gather(*slow, return_exceptions=True)
        assert {type(error) for error in errors} == {MediaFetchTimeout}
        assert await f.get(origin.url("/a"), "other\nsalt") == b"a"  # they look up still
        go.set()


@pytest.mark.parametrize("hosts", [1, 8])
async def test_b23_one_tenants_slow_servers_stop_no_other_from_fetching(hosts, monkeypatch):
    for name, number in (
        ("MAX_FETCHES", 8),
        ("MAX_FETCHES_PER_TENANT", 4),
        ("MAX_FETCHES_PER_HOST", 2),
    ):
        monkeypatch.setattr(fetch, name, number)

    async def silent(writer, asked):
        await writer.wait_closed()

    routes = {f"/silent{i}": silent for i in range(20)}
    names = {f"{i}.test": [[OPEN]] for i in range(hosts)}
    async with (
        Origin(routes | {"/a": reply(200, b"a")}) as origin,
        Fetching(settings(seconds=1.0), NamedGate(names)) as f,
    ):
        urls = [origin.url(path, f"{i % hosts}.test") for i, path in enumerate(routes)]
        slow = [asyncio.create_task(f.get(url, "slow\n")) for url in urls]
        while len(origin.asked) < min(2 * hosts, 4):
            await asyncio.sleep(0.005)
        assert await f.get(origin.url("/a", "0.test"), "other\n") == b"a"
        assert not any(task.done() for task in slow)
        assert len(origin.asked) == min(2 * hosts, 4) + 1
        errors = await asyncio.gather(*slow, return_exceptions=True)
        assert {type(error) for error in errors} == {MediaFetchTimeout}
        assert await f.get(origin.url("/a", "0.test"), "slow\n") == b"a"


async def test_b24_an_endless_body_is_left_at_the_cap():
    sent = 0

    async def endless(writer, asked):
        nonlocal sent
        writer.write(b"HTTP/1.1 200 OK\r\n\r\n")
        while not writer.is_closing():
            writer.write(b"x" * 65536)
            sent += 65536
            await writer.drain()

    async def chunks(writer, asked):
        writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
        while not writer.is_closing():
            writer.write(b"8000\r\n" + b"x" * 0x8000 + b"\r\n")
            await writer.drain()

    async with Origin({"/a": endless, "/b": chunks}) as origin, Fetching() as f:
        await f.refused(MediaTooLarge, origin.url("/a"))
        await f.refused(MediaTooLarge, origin.url("/b"))
        await origin.until_left()
        assert f.count("fetched_bytes") == 0
        assert sent < 50 << 20  # what fits in buffers on the way


async def test_b24_a_declared_length_over_the_cap_is_refused_unread():
    async def boast(writer, asked):
        writer.write(reply(200, Content_Length=str(1 << 40)))
        await asyncio.sleep(60)

    async with Origin({"/a": boast}) as origin, Fetching() as f:
        await f.refused(MediaTooLarge, origin.url("/a"))
        await origin.until_left()


async def test_b24_a_false_length():
    async def more(writer, asked):  # than was declared: the rest is never read as an answer
        writer.write(reply(200, b"12345" + reply(200, b"hidden"), Content_Length="5"))

    async def less(writer, asked):
        writer.write(reply(200, b"12345", Content_Length="10"))
        writer.close()

    async with Origin({"/more": more, "/less": less}) as origin, Fetching() as f:
        for _ in range(3):
            with suppress(MediaFetchFailed):  # if it is noticed that the server has more to say
                assert await f.get(origin.url("/more")) == b"12345"
        await f.refused(MediaFetchFailed, origin.url("/less"))


async def test_b24_a_gzip_bomb_is_unpacked_up_to_the_cap():
    bomb = gzip.compress(bytes(LIMIT * 500), 9)
    assert len(bomb) < LIMIT
    routes = {
        "/bomb": reply(200, bomb, Content_Encoding="gzip"),
        "/bomb2": reply(200, zlib.compress(bytes(LIMIT + 1)), Content_Encoding="deflate"),
        "/most": reply(200, gzip.compress(bytes(LIMIT)), Content_Encoding="gzip"),
        "/small": reply(200, zlib.compress(b"small"), Content_Encoding="deflate"),
        "/raw": reply(200, zlib.compress(b"small", wbits=-15), Content_Encoding="deflate"),
    }
    async with Origin(routes) as origin, Fetching() as f:
        await f.refused(MediaTooLarge, origin.url("/bomb"))
        await f.refused(MediaTooLarge, origin.url("/bomb2"))
        assert await f.get(origin.url("/most")) == bytes(LIMIT)
        assert await f.get(origin.url("/small")) == b"small"
        assert await f.get(origin.url("/raw")) == b"small"


@pytest.mark.parametrize(
    ("path", "error"), [("/junk", MediaFetchFailed), ("/empty-blocks", MediaTooLarge)]
)
async def test_b24_a_packed_body_that_unpacks_to_nothing_is_left_at_the_cap(path, error):
    sent = Sent()
    async with Origin(sent.routes()) as origin, Fetching() as f:
        await f.refused(error, origin.url(path))
        await origin.until_left()
        assert sent[path] < 50 << 20  # what fits in buffers on the way


async def test_b24_one_compressed_stream_is_the_whole_body():
    def packed(data):
        return reply(200, data, Content_Encoding="gzip")

    file = gzip.compress(b"hello")
    routes = {"/junk": packed(file + b"junk"), "/two": packed(file * 2)}
    async with Origin(routes) as origin, Fetching() as f:
        for path in routes:
            await f.refused(MediaFetchFailed, origin.url(path))


async def test_b24_no_more_is_unpacked_than_the_cap():
    async def grow(size):
        return LIMIT

    bomb = gzip.compress(bytes(LIMIT * 500), 9)
    tracemalloc.start()
    try:
        with BodyFile(LIMIT, grow) as body, pytest.raises(MediaTooLarge):
            await BodyDecompressor(body).write(bomb)
        assert tracemalloc.get_traced_memory()[1] < 2 * LIMIT + 2 * DECOMPRESS_STEP
    finally:
        tracemalloc.stop()
