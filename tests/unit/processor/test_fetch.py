"""Fetching media: from real servers of this machine, good and hostile.

OPEN stands for an address of the open network; 127.0.0.1 and the rest are closed as ever.
"""

import asyncio
import gzip
import os
import shutil
import ssl
import subprocess
import threading
import zlib
from contextlib import suppress

import pytest

from support.origin import OPEN, NamedGate, Origin, moved, reply
from triptych.config import CacheSettings, Config, Limits
from triptych.errors import (
    MediaError,
    MediaFetchFailed,
    MediaFetchTimeout,
    MediaTooLarge,
    MediaURLBlocked,
    UnsupportedURLScheme,
)
from triptych.processor.fetch import Fetcher

LIMIT = 100_000


def settings(seconds=20.0, cache=0, **more):
    limits = Limits(fetch_seconds=seconds, media_bytes=LIMIT)
    return Config(limits=limits, cache=CacheSettings(fetched=cache), **more)


class Fetching:
    """A fetcher for the length of a test."""

    def __init__(self, config=None, gate=None):
        self.gate = gate or NamedGate()
        self.fetcher = Fetcher(config or settings(), self.gate)

    async def __aenter__(self):
        return self

    async def __aexit__(self, *exc):
        await self.fetcher.close()

    async def get(self, url, scope="tenant\n"):
        return await self.fetcher.fetch(url, scope)

    async def refused(self, kind, url):
        with pytest.raises(MediaError) as caught:
            await self.get(url)
        error = caught.value
        assert type(error) is kind, error.message
        assert error.param is None
        for secret in ("127.0", "169.254", "ok.test", "::1", "hidden"):
            assert secret not in error.message
        return error

    def count(self, name):
        return self.fetcher.counters[name]


async def test_fetches_a_file():
    body = os.urandom(LIMIT)
    async with Origin({"/a?b=c": reply(200, body)}) as origin, Fetching() as f:
        assert await f.get(origin.url("/a?b=c#part")) == body
        assert (f.count("fetched_files"), f.count("fetched_bytes")) == (1, LIMIT)
        headers = origin.asked[0].headers
    assert headers["host"] == f"ok.test:{origin.port}"
    assert headers["accept-encoding"] == "identity"
    assert headers["user-agent"].startswith("Triptych/")
    assert not {"cookie", "authorization", "referer"} & set(headers)


async def test_keeps_no_cookies_and_one_connection():
    routes = {"/a": reply(200, b"a", Set_Cookie="x=1"), "/b": reply(200, b"b")}
    async with Origin(routes) as origin, Fetching() as f:
        assert [await f.get(origin.url(path)) for path in ("/a", "/b", "/a")] == [b"a", b"b", b"a"]
        assert origin.accepts == 1
        assert all("cookie" not in asked.headers for asked in origin.asked)


async def test_takes_no_proxy_from_the_environment(monkeypatch):
    async with Origin({}) as proxy, Origin({"/a": reply(200, b"a")}) as origin, Fetching() as f:
        for name in ("http_proxy", "HTTP_PROXY", "ALL_PROXY"):
            monkeypatch.setenv(name, f"http://{OPEN}:{proxy.port}")
        assert await f.get(origin.url("/a")) == b"a"
        assert proxy.accepts == 0


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


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
async def test_follows_redirects(status):
    routes = {"/a": moved("/b", status), "/b": moved("c?x", status), "/c?x": reply(200, b"c")}
    async with Origin(routes) as origin, Fetching() as f:
        assert await f.get(origin.url("/a")) == b"c"


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

    async def resolve(self, host, port=0, family=0):
        found = await super().resolve(host, port, family)
        return [one | {"host": "127.0.0.1"} for one in found] + found


async def test_b19_an_address_that_changes_after_the_check_is_blocked():
    """Connecting is refused by the socket itself, whatever resolver and checks said before."""
    async with Origin({"/": reply(200, b"hidden")}, "127.0.0.1") as closed:
        async with Fetching(gate=Rebinding()) as f:
            await f.refused(MediaFetchFailed, f"http://ok.test:{closed.port}/")
            assert set(f.gate.opened) <= {OPEN}  # nothing listens there
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


async def test_a_redirect_from_https_to_http_is_blocked(tls):
    server, trusting = tls
    async with Origin({"/a": reply(200, b"a")}) as origin:
        routes = {"/down": moved(origin.url("/a")), "/a": reply(200, b"safe")}
        async with Secure(routes, server) as secure, Fetching() as f:
            f.fetcher._client().connector._ssl = trusting
            assert await f.get(secure.url("/a").replace("http:", "https:")) == b"safe"
            await f.refused(MediaURLBlocked, secure.url("/down").replace("http:", "https:"))
            origin.routes["/up"] = moved(secure.url("/a").replace("http:", "https:"))
            assert await f.get(origin.url("/up")) == b"safe"
        assert [asked.path for asked in origin.asked] == ["/up"]


async def test_a_certificate_that_is_not_trusted_is_a_failure(tls):
    async with Secure({"/a": reply(200, b"a")}, tls[0]) as secure, Fetching() as f:
        await f.refused(MediaFetchFailed, secure.url("/a").replace("http:", "https:"))
        assert secure.asked == []


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
    async def more(writer, asked):  # than was declared: the rest is never taken for an answer
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


async def test_only_from_permitted_domains_also_after_redirects():
    names = {"cdn.ok.test": [[OPEN]], "evil.test": [[OPEN]], "notok.test": [[OPEN]]}
    async with Origin({"/a": reply(200, b"a")}) as origin:
        config = settings(allowed_media_domains="ok.test")
        async with Fetching(config, NamedGate(names)) as f:
            assert await f.get(origin.url("/a")) == b"a"
            assert await f.get(origin.url("/a", "cdn.ok.test")) == b"a"
            connections = origin.accepts
            origin.routes["/b"] = moved(origin.url("/a", "evil.test"))
            for host in ("evil.test", "notok.test", OPEN, "ok.test.evil.test"):
                await f.refused(MediaURLBlocked, origin.url("/a", host))
            await f.refused(MediaURLBlocked, origin.url("/b"))
            assert origin.accepts == connections
            assert "evil.test" not in f.gate.looked_up


async def test_private_addresses_where_they_are_permitted_but_never_metadata():
    async with Origin({"/a": reply(200, b"a")}, "127.0.0.1") as origin:
        config = settings(allow_private_media=True)
        async with Fetching(config, NamedGate(CLOSED, private=True)) as f:
            for host in ("127.0.0.1", "named.test", "localhost"):
                assert await f.get(origin.url("/a", host)) == b"a"
            await f.refused(MediaURLBlocked, "http://169.254.169.254/")
            await f.refused(MediaURLBlocked, "http://metadata.test/")


async def test_asks_whether_a_kept_file_has_changed():
    async def versioned(writer, asked):
        if asked.headers.get("if-none-match") == tag:
            writer.write(reply(304))
        else:
            writer.write(reply(200, body, ETag=tag))

    tag, body = '"1"', b"one"
    async with Origin({"/a": versioned}) as origin, Fetching(settings(cache=1 << 20)) as f:
        url = origin.url("/a")
        assert [await f.get(url) for _ in range(3)] == [b"one"] * 3
        assert len(origin.asked) == 3
        assert (f.count("fetched_files"), f.count("fetch_cache_hits")) == (1, 2)
        tag, body = '"2"', b"two"
        assert [await f.get(url) for _ in range(2)] == [b"two"] * 2
        assert (f.count("fetched_files"), f.count("fetch_cache_misses")) == (2, 2)
        assert f.count("fetch_cache_bytes") > 0


async def test_asks_by_date_and_at_the_address_that_gave_the_file():
    async def dated(writer, asked):
        since = asked.headers.get("if-modified-since")
        writer.write(reply(304) if since else reply(200, b"x", Last_Modified="then"))

    routes = {"/a": moved("/b"), "/b": dated}
    async with Origin(routes) as origin, Fetching(settings(cache=1 << 20)) as f:
        assert [await f.get(origin.url("/a")) for _ in range(2)] == [b"x", b"x"]
        assert [asked.headers.get("if-modified-since") for asked in origin.asked] == [
            None,
            None,
            None,
            "then",
        ]
        origin.routes["/a"] = moved("/c")  # another file now
        origin.routes["/c"] = reply(200, b"y")
        assert await f.get(origin.url("/a")) == b"y"


async def test_does_not_ask_while_a_file_is_fresh_nor_keep_what_it_may_not():
    routes = {
        "/fresh": reply(200, b"a", Cache_Control="max-age=60"),
        "/never": reply(200, b"b", Cache_Control="no-store, max-age=60", ETag="1"),
    }
    async with Origin(routes) as origin, Fetching(settings(cache=1 << 20)) as f:
        for path, times in (("/fresh", 1), ("/never", 3)):
            for _ in range(3):
                await f.get(origin.url(path))
            assert [asked.path for asked in origin.asked].count(path) == times
        assert not any("if-none-match" in asked.headers for asked in origin.asked)


async def test_b41_scopes_share_neither_kept_files_nor_flights():
    async def fresh(writer, asked):
        await asyncio.sleep(0.02)
        writer.write(reply(200, b"a", Cache_Control="max-age=60"))

    async with Origin({"/a": fresh}) as origin, Fetching(settings(cache=1 << 20)) as f:
        url = origin.url("/a")
        await asyncio.gather(f.get(url, "a\n"), f.get(url, "b\n"), f.get(url, "b\nsalt"))
        await asyncio.gather(f.get(url, "a\n"), f.get(url, "b\n"), f.get(url, "c\n"))
        assert len(origin.asked) == 4


class Held:
    """A route that answers when it is told."""

    def __init__(self, answer):
        self.answer = answer
        self.reached = asyncio.Event()
        self.go = asyncio.Event()

    async def __call__(self, writer, asked):
        self.reached.set()
        await self.go.wait()
        writer.write(self.answer)


async def test_the_same_file_asked_for_at_once_flies_once():
    held = Held(reply(200, b"a"))
    async with Origin({"/a": held}) as origin, Fetching() as f:
        asking = [asyncio.create_task(f.get(origin.url("/a"))) for _ in range(50)]
        await held.reached.wait()
        held.go.set()
        assert await asyncio.gather(*asking) == [b"a"] * 50
        assert len(origin.asked) == 1


async def test_a_waiter_that_leaves_does_not_end_it_for_the_others():
    held = Held(reply(200, b"a"))
    async with Origin({"/a": held}) as origin, Fetching() as f:
        first, second = (asyncio.create_task(f.get(origin.url("/a"))) for _ in range(2))
        await held.reached.wait()
        first.cancel()
        await asyncio.gather(first, return_exceptions=True)
        held.go.set()
        assert await second == b"a"
        assert first.cancelled()
        assert len(origin.asked) == 1


async def test_when_all_waiters_leave_the_connection_closes_and_a_newcomer_starts_anew():
    held = Held(reply(200, b"a"))
    async with Origin({"/a": held}) as origin, Fetching() as f:
        asking = [asyncio.create_task(f.get(origin.url("/a"))) for _ in range(2)]
        await held.reached.wait()
        for task in asking:
            task.cancel()
        await asyncio.gather(*asking, return_exceptions=True)
        held.go.set()
        assert await f.get(origin.url("/a")) == b"a"
        assert (len(origin.asked), origin.accepts) == (2, 2)


async def test_each_waiter_has_an_error_of_its_own():
    held = Held(reply(404))
    async with Origin({"/a": held}) as origin, Fetching() as f:
        asking = [asyncio.create_task(f.get(origin.url("/a"))) for _ in range(2)]
        await held.reached.wait()
        held.go.set()
        errors = await asyncio.gather(*asking, return_exceptions=True)
        assert all(isinstance(error, MediaFetchFailed) for error in errors)
        assert errors[0] is not errors[1]


def descriptors():
    return len(os.listdir("/proc/self/fd"))


async def test_leaves_no_descriptor_behind():
    async def forever(writer, asked):
        writer.write(reply(200, b"x" * 10, Content_Length="1000"))
        await asyncio.sleep(60)

    routes = {"/a": reply(200, b"a"), "/gone": reply(404), "/big": reply(200, bytes(LIMIT + 1))}
    before = descriptors()
    async with Origin(routes | {"/forever": forever}) as origin:
        async with Fetching() as f:
            for _ in range(5):
                assert await f.get(origin.url("/a")) == b"a"
                await f.refused(MediaFetchFailed, origin.url("/gone"))
                await f.refused(MediaTooLarge, origin.url("/big"))
                with pytest.raises(TimeoutError):
                    async with asyncio.timeout(0.02):
                        await f.get(origin.url("/forever"))
            left = asyncio.create_task(f.get(origin.url("/forever")))
            await asyncio.sleep(0.02)
        assert (await asyncio.gather(left, return_exceptions=True))[0] is not None
        await origin.until_left()
    async with asyncio.timeout(10):
        while descriptors() != before:  # the server's own close a moment later
            await asyncio.sleep(0.005)


class Secure(Origin):
    """The same with TLS."""

    def __init__(self, routes, context):
        super().__init__(routes)
        self._context = context

    async def __aenter__(self):
        self._server = await asyncio.start_server(self._serve, self.host, 0, ssl=self._context)
        self.port = self._server.sockets[0].getsockname()[1]
        return self


@pytest.fixture(scope="module")
def tls(tmp_path_factory):
    """A server's context with a certificate for ok.test, and a client's that trusts it."""
    if shutil.which("openssl") is None:
        pytest.skip("openssl makes the certificate")
    pem = str(tmp_path_factory.mktemp("tls") / "both.pem")
    words = ["req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=ok.test"]
    words += ["-addext", "subjectAltName=DNS:ok.test", "-keyout", pem + ".key", "-out", pem]
    subprocess.run(["openssl", *words], check=True, capture_output=True)
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server.load_cert_chain(pem, pem + ".key")
    return server, ssl.create_default_context(cafile=pem)
