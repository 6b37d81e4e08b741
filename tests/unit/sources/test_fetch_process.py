"""The fetching process: bytes of servers stall no request here, and its end fails none for good."""

import asyncio
import os
import signal
import subprocess
import sys

import psutil
import pytest

from support.fetching import Fetching, settings
from support.hostile_servers import Sent
from support.origin import Origin, reply
from support.rows import in_thread
from triptych.errors import MediaFetchFailed, MediaFetchTimeout, MediaTooLarge, ServiceError
from triptych.media import lockdown
from triptych.observe.event_loop_lag import STALL_SECONDS, EventLoopLag
from triptych.sources import fetch_channel, fetch_process
from triptych.sources.fetch_process import FetchProcess

HOST = "127.0.0.1"


def fetching(**more):
    config = settings(allow_private_media=True, **more)
    return Fetching(config, client=FetchProcess(private=True, media_bytes=8 << 20))


def processes():
    return [
        child
        for child in psutil.Process().children()
        if "triptych.sources.fetch_sandbox" in child.cmdline()
    ]


async def until(condition):
    async with asyncio.timeout(20):
        while not condition():
            await asyncio.sleep(0.005)


LOCKED = """
import os, socket, ssl, sys
from triptych.sources import fetch_sandbox

def tried(act):
    try:
        act()
    except PermissionError:
        return "refused"
    return "allowed"

fetch_sandbox._limit(1 << 20)
acts = [
    lambda: open(f"/proc/{os.getppid()}/environ", "rb").read(),
    lambda: os.listdir(f"/proc/{os.getppid()}/fd"),
    lambda: open(sys.argv[1]).read(),
    lambda: open(sys.argv[1], "w"),
    lambda: os.kill(os.getppid(), 0),
    lambda: socket.getaddrinfo("localhost", 80),
    lambda: open("/etc/resolv.conf").read(),
    lambda: ssl.create_default_context(),
    lambda: socket.create_connection(("127.0.0.1", int(sys.argv[2]))),
]
print(*map(tried, acts))
"""


async def test_the_process_reads_no_secrets_and_still_resolves_and_connects(tmp_path):
    """Also not by /proc, where the environment of the frontend is: it holds the API keys."""
    secret = tmp_path / "secret"
    secret.write_text("key")
    async with Origin({}, HOST) as origin:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-c", LOCKED, str(secret), str(origin.port)),
            stdout=subprocess.PIPE,
        )
        found = (await process.communicate())[0].decode().split()
    if landlock_version() < 6:  # it does not keep signals inside
        del found[4]
    assert found == ["refused"] * (len(found) - 4) + ["allowed"] * 4


def landlock_version():
    try:
        return lockdown.landlock_version()
    except OSError:
        pytest.skip("this kernel has no Landlock")


async def test_fetches_small_and_large_files_and_leaves_nothing_behind():
    size = 5 << 20
    large = os.urandom(size)
    before = len(os.listdir("/proc/self/fd"))
    async with Origin({"/a": reply(200, b"a"), "/large": reply(200, large)}, HOST) as origin:
        config = settings(allow_private_media=True)
        client = FetchProcess(private=True, media_bytes=size)
        async with Fetching(config, client=client) as f:
            f.fetcher._limit = size
            assert await f.get(origin.url("/a", HOST)) == b"a"
            (child,) = processes()
            during = len(os.listdir("/proc/self/fd"))
            for _ in range(3):
                body = await f.get(origin.url("/large", HOST))
                assert body == large
                assert body.readonly
            assert len(os.listdir("/proc/self/fd")) == during
            assert origin.accepts == 1
            assert child.num_fds() < 20
            assert child.nice() >= lockdown.NICENESS
            assert not {"HOME", "PATH", "TRIPTYCH_API_KEY"} & set(child.environ())
        assert processes() == []
    await until(lambda: len(os.listdir("/proc/self/fd")) == before)


async def test_b43_hostile_servers_stall_no_request_and_are_left():
    """Twenty at once, two of each kind. Looked at is the CPU time of this loop's callbacks: on a
    busy machine they are late for other reasons as well.
    """
    sent = Sent()
    routes = sent.routes()
    limit = 4 << 20  # no kind but those that send a body comes near it
    with in_thread(
        Origin(routes | {"/fine": reply(200, b"fine", Connection="close")}, HOST)
    ) as origin:
        async with fetching(seconds=2.0) as f:
            f.fetcher._limit = limit
            assert await f.get(origin.url("/fine", HOST)) == b"fine"
            (child,) = processes()
            lag = EventLoopLag()
            tasks = {
                path: [
                    asyncio.create_task(f.get(origin.url(path, HOST), f"hostile\n{n}"))
                    for n in range(2)
                ]
                for path in routes
            }
            await until(lambda: all(sent[path] for path in routes if path != "/dribble"))
            for n in range(5):
                assert await f.get(origin.url("/fine", HOST), f"other\n{n}") == b"fine"
            assert not any(task.done() for task in tasks["/dribble"])  # they go on
            for path, running in tasks.items():
                errors = await asyncio.gather(*running, return_exceptions=True)
                kind = {
                    "/dribble": MediaFetchTimeout,
                    "/bomb": MediaTooLarge,
                    "/empty-blocks": MediaTooLarge,
                }
                expected = {kind.get(path, MediaFetchFailed)}
                assert {type(error) for error in errors} == expected, path
            lag.stop()
            assert lag.max_cpu < STALL_SECONDS
            assert f.client.losses == 0
            await until(lambda: origin.is_left)
            await until(lambda: child.num_fds() < 20)  # what it keeps: its socket, idle ones
            assert child.memory_info().rss < 200 << 20
            for path in routes:  # what fits in buffers on the way, for each of two
                assert sent[path] < 2 * ((8 << 20) + limit), path


async def test_a_lost_or_hanging_process_fails_its_fetches_and_is_replaced(monkeypatch):
    monkeypatch.setattr(fetch_process, "PING_SECONDS", 0.1)
    go = asyncio.Event()

    async def held(writer, asked):
        await go.wait()

    async with Origin({"/a": reply(200, b"a"), "/held": held}, HOST) as origin:
        async with fetching() as f:
            for number, sign in enumerate((signal.SIGKILL, signal.SIGSTOP)):
                assert await f.get(origin.url("/a", HOST)) == b"a"
                (child,) = processes()
                asking = asyncio.create_task(f.get(origin.url("/held", HOST)))
                await until(lambda: origin.asked[-1].path == "/held")
                child.send_signal(sign)
                with pytest.raises(ServiceError, match="Try again") as caught:
                    await asking
                assert caught.value.status == 503
                assert not child.is_running()
                assert f.count("fetch_process_losses") == number + 1
            assert await f.get(origin.url("/a", HOST)) == b"a"
            assert f.budget.counters["loaded_bytes"] == 0
        go.set()


async def test_b43_the_deadline_holds_while_the_process_is_silent():
    async with Origin({"/a": reply(200, b"a")}, HOST) as origin, fetching(seconds=1.0) as f:
        f.client.start()
        await until(lambda: f.client._process.started)
        (child,) = processes()
        child.suspend()
        with pytest.raises(MediaFetchTimeout):
            await f.get(origin.url("/a", HOST))
        child.resume()
        assert await f.get(origin.url("/a", HOST), "other\n") == b"a"
        assert f.client.losses == 0


async def test_cancelling_closes_the_connection():
    async def held(writer, asked):
        await writer.wait_closed()

    async with Origin({"/held": held}, HOST) as origin, fetching() as f:
        asking = asyncio.create_task(f.get(origin.url("/held", HOST)))
        await until(lambda: origin.asked)
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
        await origin.until_left()
        (child,) = processes()
        left = asyncio.create_task(f.get(origin.url("/held", HOST)))
        await until(lambda: len(origin.asked) == 2)
        await f.fetcher.close()
        assert (await asyncio.gather(left, return_exceptions=True))[0] is not None
        assert not child.is_running()
        with pytest.raises(ServiceError):
            await f.client.get(None, None)


TALKS = """
import socket, sys, time
door = socket.socket(fileno=int(sys.argv[1]))
door.recv(1 << 20), door.recv(1 << 20)
door.send(bytes.fromhex(sys.argv[2]))
time.sleep(60)
"""
GOT = fetch_process.msgspec.msgpack.encode(fetch_process.FetchDone(0, 200, {}, 7))


@pytest.mark.parametrize("said", [b"\xc1nonsense", GOT], ids=["garbage", "no body"])
async def test_a_process_that_talks_nonsense_is_replaced(monkeypatch, said):
    def spawn(module, sock, environment):
        door = sock.fileno()
        words = [sys.executable, "-c", TALKS, str(door), said.hex()]
        return subprocess.Popen(words, pass_fds=(door,))

    async with Origin({"/a": reply(200, b"a")}, HOST) as origin, fetching() as f:
        with monkeypatch.context() as patch:
            patch.setattr(fetch_process, "spawn_clean", spawn)
            with pytest.raises(ServiceError, match="Try again"):
                await f.get(origin.url("/a", HOST))
            assert f.client.losses == 1
        if f.client._process is not None:  # the next of the same kind
            f.client._process.started = False
            f.client._process._lose("for the test")
        assert await f.get(origin.url("/a", HOST)) == b"a"


async def test_a_body_that_could_still_change_is_not_read():
    for size in (10, fetch_channel.COPY_BYTES + 1):
        fd = os.memfd_create("x", os.MFD_ALLOW_SEALING)
        os.write(fd, bytes(size))
        with pytest.raises(ValueError, match="not sealed"):
            await fetch_channel.read_body(os.dup(fd), size, 1 << 20)
        with pytest.raises(ValueError, match="another size"):
            await fetch_channel.read_body(os.dup(fd), size + 1, 1 << 20)
        with pytest.raises(ValueError, match="another size"):
            await fetch_channel.read_body(fd, size, size - 1)


LIVES = """
import asyncio, os
from triptych.sources.fetch_process import FetchProcess

async def main():
    client = FetchProcess(private=True, media_bytes=1000)
    client.start()
    print(client._process._process.pid, flush=True)
    await asyncio.sleep(60)

asyncio.run(main())
"""


def test_the_process_dies_with_its_frontend():
    with subprocess.Popen([sys.executable, "-c", LIVES], stdout=subprocess.PIPE) as parent:
        child = psutil.Process(int(parent.stdout.readline()))
        parent.kill()
    child.wait(20)
    assert not child.is_running()
