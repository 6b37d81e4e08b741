"""Real processes that find each other on NATS: the same tokens, whatever becomes of NATS."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from support.nats_server import NatsServer, nats_server
from support.promises import LONG, unharmed
from support.servers import TestServer, image_part, serving, text_part
from triptych.host import free_port
from triptych.runtime.lease import FORGET_SECONDS, LEASE_SECONDS

CLIENTS = 8
# Two leases, and everybody who counts time while out of touch has dropped everyone; in the long
# form more than all else that lapses: what NATS keeps for readers, and epochs of the dead.
AWAY_SECONDS = FORGET_SECONDS + LEASE_SECONDS if LONG else 2 * LEASE_SECONDS + 2
SECRET = {"TRIPTYCH_SECRET": "x" * 32}
FLAGS = ["--engine=fake", "--enable-multimodal", "--fake-ttft-ms=5", "--fake-step-ms=5"]
FLAGS += ["--served-model-name=m"]


def body(i: int) -> dict[str, Any]:
    """Half of them with a picture."""
    content = [*([image_part(bytes([i]))] if i % 2 else []), text_part(f"Number {i}?")]
    messages = [{"role": "user", "content": content}]
    return {
        "model": "m",
        "messages": messages,
        "seed": i,
        "max_tokens": 24,
        "return_token_ids": True,
    }


async def ask(session: aiohttp.ClientSession, i: int) -> list[int]:
    async with session.post("/v1/chat/completions", json=body(i)) as got:
        answer = await got.json()
        assert got.status == 200, answer
        ids: list[int] = answer["choices"][0]["token_ids"]
        return ids


async def _answers(server: TestServer, meanwhile: Callable[[], None] | None) -> list[list[int]]:
    """Of every client, again and again while something happens: always the same."""
    stop = asyncio.Event()
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(server.url, connector=connector) as session:
        wanted = [await ask(session, i) for i in range(CLIENTS)]

        async def go_on(i: int) -> None:
            while not stop.is_set():
                assert await ask(session, i) == wanted[i]

        if meanwhile is not None:
            async with asyncio.TaskGroup() as clients:
                for i in range(CLIENTS):
                    clients.create_task(go_on(i))
                try:
                    await asyncio.to_thread(meanwhile)
                finally:
                    stop.set()
    return wanted


def answers(server: TestServer, meanwhile: Callable[[], None] | None = None) -> list[list[int]]:
    try:
        return asyncio.run(_answers(server, meanwhile))
    except BaseExceptionGroup as errors:
        errors.add_note(server.tail())
        raise


def pids(server: TestServer) -> dict[str, int]:
    """Of the workers, by id. One that is too busy to answer is left out: ask again."""
    return {name: worker["pid"] for name, worker in server.cluster().items()}


def away(server: TestServer) -> bool:
    away: bool = server.state()["discovery"]["away"]
    return away


@pytest.fixture(scope="module")
def wanted() -> list[list[int]]:
    """What is answered where all is in one run directory."""
    with serving(*FLAGS, "--pattern=E/P/D") as server:
        assert server.state()["discovery"]["namespace"] == "default"
        return answers(server)


@contextlib.contextmanager
def joined(pattern: str, *words: str, **nats: Any) -> Iterator[tuple[NatsServer, TestServer]]:
    with nats_server(**nats) as server, contextlib.ExitStack() as scope:
        flags = [*FLAGS, f"--pattern={pattern}", f"--join={server.url}", *words]
        yield server, scope.enter_context(serving(*flags, env=SECRET))


@pytest.mark.parametrize("plane", ["tcp", "nats"])
@pytest.mark.parametrize("kept", [True, False], ids=["file", "memory"])
def test_nats_restarted_under_load_fails_no_request(
    tmp_path: Path, wanted: list[list[int]], kept: bool, plane: str
) -> None:
    """Tokens equal those of the run directory. Proved (memory) by keeping a bucket that is lost:
    workers are dropped after a lease; (nats) with ``Stream.AWAY`` of no tick."""
    store = tmp_path / "store" if kept else None
    with joined("E/P/D", f"--request-plane={plane}", store=store) as (nats, server):
        place = {"place": nats.url, "namespace": "default", "away": False}
        assert server.state()["discovery"] == place

        def restart() -> None:
            for _ in range(2):
                nats.restart()
                time.sleep(AWAY_SECONDS / 2)  # a lease, in which a lost worker would be missed
            server.wait(lambda: not away(server), what="NATS is back")

        before = pids(server)
        assert answers(server, restart) == wanted
        server.wait(lambda: pids(server) == before, what="the same processes as before")


def test_f14_nats_away_fails_no_request_and_a_death_is_noticed_all_the_same(
    wanted: list[list[int]],
) -> None:
    """Proved by letting time pass while out of touch: all workers are dropped: 503. In its
    long form (a minute away) it takes over a minute."""
    with joined("E/P*2/D") as (nats, server), unharmed(server, "P-1"):
        server.wait(lambda: len(pids(server)) == 4, what="every worker answers")
        before = pids(server)

        def leave() -> None:
            nats.stop()
            server.wait(lambda: away(server), what="NATS is seen to be away")
            time.sleep(AWAY_SECONDS)
            everyone = {"E-0", "P-0", "P-1", "D-0"}
            server.wait(lambda: set(server.cluster()) == everyone, what="all are known still")
            assert server.healthy()
            os.kill(
                before["P-1"], signal.SIGKILL
            )  # its connections close, and its requests migrate
            server.wait(lambda: "P-1" not in server.cluster(), what="P-1 is missed")
            assert server.healthy()
            assert away(server)
            nats.start()
            server.wait(lambda: "P-1" in server.cluster(), seconds=60, what="P-1 is back")
            assert not away(server)

        assert answers(server, leave) == wanted


def test_workers_behind_a_nats_that_stays_away_are_missed_soon(wanted: list[list[int]]) -> None:
    """The request that waits fails, and later ones fail at once. Proved with 38 s."""
    with joined("EPD", "--request-plane=nats") as (nats, server):
        assert server.chat("Hello").status == 200
        nats.stop()
        started = time.monotonic()
        for most in (30.0, 5.0):
            answer = server.chat("Hello")
            assert (answer.status, answer.json["error"]["code"]) == (503, "nats_away")
            assert "NATS" in answer.json["error"]["message"]
            assert time.monotonic() - started < most
            started = time.monotonic()
        assert not server.healthy()
        [unused] = server.state()["unused"]
        assert (unused["id"], "NATS is away" in unused["why"]) == ("EPD-0", True)
        nats.start()
        server.wait(server.healthy, what="it serves again")
        assert server.chat("Hello").status == 200


def test_a_second_server_in_one_namespace_ends_and_says_why() -> None:
    with joined("E/PD") as (nats, server):
        words = [sys.executable, "-m", "triptych", "serve", *FLAGS, "--port=0", "--pattern=E/PD"]
        words += [f"--join={nats.url}"]
        second = subprocess.run(words, env=os.environ | SECRET, capture_output=True, timeout=60)
        told = second.stderr.decode()
        assert (second.returncode, "ready after" in told) == (2, False)
        assert "worker E-0 is there already (process" in told
        assert "Give this one another --namespace; or, to add workers" in told
        assert server.healthy()
        with serving(*FLAGS, f"--join={nats.url}", "--pattern=EPD", env=SECRET) as other:
            # Of another pattern: both serve, each with its own.
            assert {one["id"] for one in other.state()["unused"]} == {"E-0", "PD-0"}
            server.wait(lambda: bool(server.state()["unused"]), what="it is seen")
            assert server.state()["unused"][0]["id"] == "EPD-0"
            endpoint = other.cluster()["EPD-0"]["endpoint"]
            assert endpoint == "triptych://default.EPD-0.generate"


def test_a_frozen_nats_fails_no_request(wanted: list[list[int]]) -> None:
    with joined("E/P/D") as (nats, server):

        def freeze() -> None:
            with nats.frozen():
                server.wait(lambda: away(server), what="NATS is seen to be away")
                time.sleep(AWAY_SECONDS)
                assert server.healthy()
            server.wait(lambda: not away(server), what="NATS is back")
            time.sleep(AWAY_SECONDS / 2)
            assert server.healthy()

        before = pids(server)
        assert answers(server, freeze) == wanted
        server.wait(lambda: pids(server) == before, what="the same processes as before")


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., subprocess.Popen[bytes]]]:
    """Starts one ``triptych`` process; all are stopped in the end."""
    running = []

    def start(*words: str) -> subprocess.Popen[bytes]:
        argv = [sys.executable, "-m", "triptych", *words, *FLAGS]
        with open(tmp_path / "log", "ab") as log:
            running.append(subprocess.Popen(argv, env=os.environ | SECRET, stderr=log))
        return running[-1]

    yield start
    for process in running:
        if process.poll() is None:
            process.terminate()
    for process in running:
        process.wait(timeout=60)


def test_each_started_by_hand_with_two_frontends_and_another_namespace(
    start: Callable[..., subprocess.Popen[bytes]], tmp_path: Path, wanted: list[list[int]]
) -> None:
    log = tmp_path / "log"
    with nats_server() as nats:
        common = [f"--join={nats.url}", "--pattern=E/P/D"]

        def frontend(*words: str) -> TestServer:
            port = free_port("127.0.0.1", 0)
            return TestServer(start("frontend", *common, f"--port={port}", *words), port, str(log))

        one, two = frontend(), frontend()
        workers = {role: start("worker", *common, f"--role={role}") for role in "EPD"}
        for server in (one, two):
            server.wait(server.live, what="live")
            server.wait(server.healthy, seconds=60, what="every role is there")
            assert answers(server) == wanted
        other = frontend("--namespace=other")  # now that default has a worker to report
        other.wait(other.live, what="live")
        assert other.cluster() == {}
        assert other.request("/health").status == 503
        start("worker", f"--join={nats.url}", "--pattern=E/P/D", "--role=P", "--namespace=lonely")
        for told in (
            f"still waiting for workers of E, P, D in --namespace other of NATS at {nats.url}. "
            "Other namespaces in use: default",
            f"still waiting for a frontend in --namespace lonely of NATS at {nats.url}. Other "
            "namespaces in use: default, other. Is --namespace right",
        ):
            other.wait(lambda told=told: told in log.read_text(), seconds=60, what=told)  # type: ignore[misc]

        again = start("worker", *common, "--role=E")
        assert again.wait(timeout=60) == 2
        assert "worker E-0 is there already (process" in log.read_text()

        workers["E"].send_signal(signal.SIGKILL)
        workers["E"].wait()
        one.wait(lambda: not one.healthy(), what="E is missed")
        start("worker", *common, "--role=E")  # at once: its process is known to be dead
        one.wait(one.healthy, seconds=60, what="E is back")
        assert answers(one) == wanted
        assert "Traceback" not in log.read_text()
