"""Fetching media: requests, redirects, caching and sharing, with real servers of this machine."""

import asyncio
import contextlib
import os
import shutil
import ssl
import subprocess

import pytest

from support.fetching import LIMIT, Fetching, settings
from support.origin import OPEN, NamedGate, Origin, moved, reply
from triptych.config import Config, Limits
from triptych.errors import (
    MediaFetchFailed,
    MediaTooLarge,
    MediaURLBlocked,
)

CLOSED = {
    "named.test": [["127.0.0.1"]],
    "metadata.test": [["169.254.169.254"]],
    "localhost": [["127.0.0.1"]],
    "a.localhost": [["127.0.0.1"]],
}


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


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
async def test_follows_redirects(status):
    routes = {"/a": moved("/b", status), "/b": moved("c?x", status), "/c?x": reply(200, b"c")}
    async with Origin(routes) as origin, Fetching() as f:
        assert await f.get(origin.url("/a")) == b"c"


async def test_a_redirect_from_https_to_http_is_blocked(tls):
    server, trusting = tls
    async with Origin({"/a": reply(200, b"a")}) as origin:
        routes = {"/down": moved(origin.url("/a")), "/a": reply(200, b"safe")}
        async with Secure(routes, server) as secure, Fetching() as f:
            f.client.tls = trusting
            assert await f.get(secure.url("/a").replace("http:", "https:")) == b"safe"
            await f.refused(MediaURLBlocked, secure.url("/down").replace("http:", "https:"))
            origin.routes["/up"] = moved(secure.url("/a").replace("http:", "https:"))
            assert await f.get(origin.url("/up")) == b"safe"
        assert [asked.path for asked in origin.asked] == ["/up"]


async def test_a_certificate_that_is_not_trusted_is_a_failure(tls):
    async with Secure({"/a": reply(200, b"a")}, tls[0]) as secure, Fetching() as f:
        await f.refused(MediaFetchFailed, secure.url("/a").replace("http:", "https:"))
        assert secure.asked == []


async def test_a_large_file_over_tls_comes_whole(tls):
    body = bytes(range(256)) * 20_000
    config = Config(limits=Limits(media_bytes=len(body)))
    async with Secure({"/a": reply(200, body)}, tls[0]) as secure, Fetching(config) as f:
        f.client.tls = tls[1]
        assert await f.get(secure.url("/a").replace("http:", "https:")) == body


async def test_b43_a_tls_handshake_without_end_is_cut():
    """Records full of HelloRequests, which TLS takes and drops. Proved without ``TlsBytes``: it
    goes on until the deadline."""
    sent, flooding = 0, []

    async def flood(reader, writer):
        nonlocal sent
        flooding.append(writer)
        with contextlib.suppress(ConnectionError):
            await reader.read(4096)
            while sent < 256 << 20:
                writer.write(b"\x16\x03\x03\x40\x00" + bytes(16384))
                await writer.drain()
                sent += 16389

    async with Origin({}) as origin, Fetching() as f:
        server = await asyncio.start_server(flood, origin.host, 0)
        port = server.sockets[0].getsockname()[1]
        await f.refused(MediaFetchFailed, f"https://ok.test:{port}/a.png")
        for writer in flooding:  # the kernel of a cut connection may let its peer wait for minutes
            writer.transport.abort()
        server.close()
    assert sent < 128 << 20


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


async def test_asks_whether_a_cached_file_has_changed():
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


async def test_b41_scopes_share_neither_cached_files_nor_downloads():
    async def fresh(writer, asked):
        await asyncio.sleep(0.02)
        writer.write(reply(200, b"a", Cache_Control="max-age=60"))

    async with Origin({"/a": fresh}) as origin, Fetching(settings(cache=1 << 20)) as f:
        url = origin.url("/a")
        await asyncio.gather(f.get(url, "a\n"), f.get(url, "b\n"), f.get(url, "b\nsalt"))
        await asyncio.gather(f.get(url, "a\n"), f.get(url, "b\n"), f.get(url, "c\n"))
        assert len(origin.asked) == 4


class Held:
    """A route that answers when it is released."""

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


async def test_a_waiter_that_leaves_does_not_end_the_call_for_the_others():
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


async def test_when_all_waiters_leave_the_connection_closes_and_the_next_one_starts_again():
    held = Held(reply(200, b"a"))
    async with Origin({"/a": held}) as origin, Fetching() as f:
        asking = [asyncio.create_task(f.get(origin.url("/a"))) for _ in range(2)]
        await held.reached.wait()
        for task in asking:
            task.cancel()
        await asyncio.gather(*asking, return_exceptions=True)
        await origin.until_left()
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
