"""What discovery on NATS does beside what every discovery does: NATS itself restarts, freezes and
forgets; it wants to know who we are; hosts have clocks of their own."""

from __future__ import annotations

import asyncio
import builtins
import contextlib
import logging
import os
import subprocess
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest

from contract.test_discovery import SHORT, record, until, watching
from support.nats_server import NatsServer, nats_server
from triptych.commands import launch
from triptych.config import Config
from triptych.errors import InvalidConfig, StartError
from triptych.host import boot_time, host_id, process_start
from triptych.runtime import discovery, lease, nats
from triptych.runtime.discovery import open_discovery
from triptych.runtime.nats_discovery import NatsDiscovery, open_nats
from triptych.runtime.planes import open_planes
from triptych.stages.process import _explain_no_calls


@pytest.fixture(autouse=True)
def fast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lease, "RENEW_SECONDS", 0.05)


@pytest.fixture
def server() -> Iterator[NatsServer]:
    """One that forgets everything with each stop."""
    with nats_server() as server:
        yield server


@contextlib.asynccontextmanager
async def pair(
    server: NatsServer, **clocks: Any
) -> AsyncIterator[tuple[NatsDiscovery, NatsDiscovery]]:
    """A worker's and a reader's."""
    options, space = Config(join=server.url), uuid.uuid4().hex
    async with (
        open_nats(
            options, space, "worker", lease=SHORT, clock=clocks.get("worker", boot_time)
        ) as w,
        open_nats(
            options, space, "reader", lease=SHORT, clock=clocks.get("reader", boot_time)
        ) as r,
    ):
        yield w, r


async def test_a_lost_bucket_is_created_again_and_workers_register_in_it(
    server: NatsServer,
) -> None:
    """Proved by keeping the bucket that is known: the worker is then never seen by a newcomer."""
    async with pair(server) as (worker, reader), watching(reader) as views:
        held = await worker.register(record(epoch=await worker.claim("P-0")))
        await until(lambda: bool(views) and views[-1] == {"P-0": held.record})
        server.restart()
        await held.update(state="draining")
        await until(lambda: views[-1]["P-0"].state == "draining")
        assert {} not in views[1:]
        await asyncio.sleep(1.5 * SHORT)
        assert set(await reader.view()) == {"P-0"}  # it is renewed, and not only remembered
        assert not held.fenced.is_set()
        assert await reader.claim("P-0") > held.record.epoch
        async with asyncio.timeout(20):
            await held.fenced.wait()
        await held.close()


# nats-py drops the socket of an attempt that failed without closing it first.
@pytest.mark.filterwarnings("ignore:.*StreamWriter:pytest.PytestUnraisableExceptionWarning")
async def test_a_frozen_nats_drops_no_worker(server: NatsServer) -> None:
    """A partition: connections stand and say nothing. Proved by waiting for an answer for ever:
    the worker does not even try for a lease, and fences itself."""
    async with pair(server) as (worker, reader), watching(reader) as views:
        held = await worker.register(record(epoch=await worker.claim("P-0")))
        await until(lambda: bool(views) and views[-1] == {"P-0": held.record})
        with server.frozen():
            await until(lambda: reader.status.away)
            await asyncio.sleep(2 * SHORT)
            assert set(await reader.view()) == {"P-0"}
            assert not held.fenced.is_set()
        await until(lambda: not reader.status.away)
        await held.update(state="draining")
        await until(lambda: views[-1]["P-0"].state == "draining")
        assert {} not in views[1:]
        assert not held.fenced.is_set()
        await held.close()


async def test_a_connection_that_was_closed_for_good_is_opened_again(server: NatsServer) -> None:
    """As a server closes it whose accounts have changed. Proved by never dialling again."""
    async with pair(server) as (worker, reader), watching(reader) as views:
        held = await worker.register(record(epoch=await worker.claim("P-0")))
        await until(lambda: bool(views) and views[-1] == {"P-0": held.record})
        for discovery in (worker, reader):
            await discovery._bucket._connection._client.close()
        await held.update(state="draining")
        await until(lambda: views[-1]["P-0"].state == "draining")
        await held.close()


async def test_a_worker_that_leaves_while_nats_is_away_leaves_no_record(
    server: NatsServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not even a worker whose lease is still renewed. Proved by dialling for it after the close."""
    before = asyncio.all_tasks()
    async with pair(server) as (worker, _):
        held = await worker.register(record(epoch=await worker.claim("P-0")))
        server.stop()
        await until(lambda: worker.status.away)
        monkeypatch.setattr(nats, "START_SECONDS", 300.0)
    await held.update(state="draining")
    async with asyncio.timeout(20):
        await held.close()
    await until(lambda: asyncio.all_tasks() == before)


async def test_namespaces_on_one_nats_see_nothing_of_each_other(server: NatsServer) -> None:
    options = Config(join=server.url)
    async with open_nats(options, "a", "1") as a, open_nats(options, "a_", "2") as b:
        epochs = await a.claim("P-0"), await b.claim("P-0")
        mine = await a.register(record(epoch=epochs[0]))
        theirs = await b.register(record(epoch=epochs[1]))
        await b.claim("P-0")
        async with asyncio.timeout(20):
            await theirs.fenced.wait()
        assert await a.view() == {"P-0": mine.record}
        assert not mine.fenced.is_set()
        assert (a.status.place, a.status.setting) == (server.url, "--namespace a")
        await mine.close()
        await theirs.close()


async def test_hosts_need_not_agree_on_the_time(
    server: NatsServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """F23. Each counts on a clock of its own, and the wall clock goes back by an hour meanwhile."""
    clocks = {"worker": lambda: boot_time() - 1e6, "reader": lambda: boot_time() + 1e6}
    async with pair(server, **clocks) as (worker, reader), watching(reader) as views:
        held = await worker.register(record(epoch=await worker.claim("P-0")))
        await until(lambda: bool(views) and views[-1] == {"P-0": held.record})
        now = time.time
        monkeypatch.setattr(time, "time", lambda: now() - 3600)
        await asyncio.sleep(1.5 * SHORT)
        assert len(views[views.index({"P-0": held.record}) :]) == 1
        assert not held.fenced.is_set()
        epoch = await worker.claim("P-0")
        assert epoch > held.record.epoch
        again = await worker.register(record(epoch=epoch))
        await until(lambda: views[-1] == {"P-0": again.record})
        async with asyncio.timeout(20):
            await held.fenced.wait()
        await held.close()
        assert await reader.view() == {"P-0": again.record}
        await again.close()


async def test_foreign_entries_in_the_bucket_are_ignored(server: NatsServer) -> None:
    async with pair(server) as (worker, reader), watching(reader) as views:
        held = await worker.register(record(epoch=await worker.claim("P-0")))
        _, bucket = await worker._bucket._open()
        for key in ("workers.P-1", "workers.P-2", "notes"):
            await bucket.put(key, b'{"epoch": "x"' if key[-1] == "1" else b"\xff\x00")
        await bucket.put("workers.P-3", (await bucket.get("workers.P-0")).value or b"")
        await until(lambda: bool(views) and views[-1] == {"P-0": held.record})
        assert await worker.claim("P-1") > 0
        await bucket.delete("workers.P-0")  # by an operator: it comes again
        await until(lambda: {} in views[1:] and views[-1] == {"P-0": held.record})
        await held.close()


async def test_an_operators_bucket_is_used_unchanged(server: NatsServer) -> None:
    client = await nats.connect(Config(join=server.url), "operator")
    await client.jetstream().create_key_value(bucket="triptych_own", history=5, max_bytes=1 << 20)
    await nats.close(client)
    async with open_nats(Config(join=server.url), "own", "test") as discovery:
        held = await discovery.register(record(epoch=await discovery.claim("P-0")))
        assert await discovery.view() == {"P-0": held.record}
        await held.close()


# --- who may join


def config(server: NatsServer, scheme: str = "nats", **settings: str) -> Config:
    return Config(join=f"{scheme}://127.0.0.1:{server.port}", **settings)


async def joins(config: Config) -> bool:
    async with open_discovery(config, "test", "secret") as discovery:
        return await discovery.view() == {}


USERS = """
accounts {
  A: { jetstream: enabled, users: [ {user: "ann", password: "hush-hush"} ] }
}"""


async def test_a_user_with_a_password_from_the_environment(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    with nats_server(extra=USERS) as server:
        with pytest.raises(StartError, match="TRIPTYCH_NATS_USER"):
            await joins(config(server))
        monkeypatch.setenv("TRIPTYCH_NATS_USER", "ann")
        monkeypatch.setenv("TRIPTYCH_NATS_PASSWORD", "hush-wrong")
        with pytest.raises(StartError, match="refused") as refused:
            await joins(config(server))
        monkeypatch.setenv("TRIPTYCH_NATS_PASSWORD", "hush-hush")
        assert await joins(config(server))
    assert "hush" not in caplog.text + str(refused.value)


async def test_a_token_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    with nats_server(extra='authorization { token: "hush-hush" }') as server:
        with pytest.raises(StartError, match="TRIPTYCH_NATS_TOKEN"):
            await joins(config(server))
        monkeypatch.setenv("TRIPTYCH_NATS_TOKEN", "hush-hush")
        assert await joins(config(server))


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A CA of our own, and what it has signed: a server for 127.0.0.1 and a client."""
    folder = tmp_path_factory.mktemp("certificates")

    def openssl(*words: str) -> None:
        subprocess.run(["openssl", *words], cwd=folder, check=True, capture_output=True)

    new = ("req", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-subj")
    openssl(*new, "/CN=ours", "-x509", "-days", "2", "-keyout", "ca.key", "-out", "ca.pem")
    (folder / "names").write_text("subjectAltName=IP:127.0.0.1\n")
    for name in ("server", "client"):
        openssl(*new, f"/CN={name}", "-keyout", f"{name}.key", "-out", f"{name}.csr")
        signed = ("-CA", "ca.pem", "-CAkey", "ca.key", "-CAcreateserial", "-extfile", "names")
        openssl("x509", "-req", "-in", f"{name}.csr", *signed, "-days", "2", "-out", f"{name}.pem")
    return folder


def tls(folder: Path, verify: str = "") -> str:
    files = f'cert_file: "{folder}/server.pem", key_file: "{folder}/server.key"'
    return f'tls {{ {files}, ca_file: "{folder}/ca.pem" {verify} }}'


async def test_tls_with_a_ca_of_our_own(certificates: Path) -> None:
    with nats_server(extra=tls(certificates)) as server:
        assert await joins(config(server, "tls", nats_ca=f"{certificates}/ca.pem"))
        assert await joins(config(server, nats_ca=f"{certificates}/ca.pem"))
        with pytest.raises(StartError, match=r"not trusted.*--nats-ca"):
            await joins(config(server, "tls"))


async def test_tls_with_our_own_certificate(certificates: Path) -> None:
    with nats_server(extra=tls(certificates, ", verify: true")) as server:
        ours = {name: f"{certificates}/client.{name[5:]}" for name in ("nats_key",)}
        ours["nats_cert"] = f"{certificates}/client.pem"
        assert await joins(config(server, nats_ca=f"{certificates}/ca.pem", **ours))


async def test_a_server_without_tls_is_refused_where_tls_is_required(
    server: NatsServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """nats-py would go on in the clear. Proved with its own client instead of ours."""
    monkeypatch.setattr(nats, "START_SECONDS", 1.0)
    monkeypatch.setenv("TRIPTYCH_NATS_USER", "ann")
    with pytest.raises(StartError, match="does not offer TLS"):
        await joins(config(server, "tls"))


# --- errors of joining say what to change


async def test_a_nats_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nats, "START_SECONDS", 0.5)
    with nats_server() as server:
        gone = config(server)
    with pytest.raises(StartError, match=r"cannot be reached.*nats-server -js.*--join"):
        await joins(gone)


async def test_a_nats_without_jetstream() -> None:
    with (
        nats_server(extra="jetstream: disabled") as server,
        pytest.raises(StartError, match="needs JetStream"),
    ):
        await joins(config(server))


@pytest.mark.parametrize("name", ["credentials", "ca", "cert", "key"])
async def test_a_file_that_is_not_there(name: str) -> None:
    named = {f"nats_{name}": "/nowhere"} | ({"nats_cert": __file__} if name == "key" else {})
    with pytest.raises(InvalidConfig, match=f"--nats-{name} /nowhere cannot be read"):
        await joins(Config(join="nats://127.0.0.1:1", **named))


async def test_without_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    usual = builtins.__import__

    def without(name: str, *rest: Any) -> Any:
        if name.partition(".")[0] == "nats":
            raise ModuleNotFoundError(name)
        return usual(name, *rest)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(InvalidConfig, match=r"pip install 'triptych\[cluster\]"):
        await nats.connect(Config(join="nats://127.0.0.1:1"), "test")


async def test_a_process_that_waits_alone_logs_where_others_are(
    server: NatsServer, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """A worker's namespace by its renewals, a frontend's by its looking there; not one that they
    have left, though their traces are there. Proved by naming buckets with entries or readers."""
    monkeypatch.setattr(discovery, "WAITING_SECONDS", 0.01)
    options = Config(join=server.url)
    async with (
        open_nats(options, "prod", "worker", lease=SHORT) as worker,
        open_nats(options, "test", "frontend", lease=SHORT) as frontend,
        open_nats(options, "prdo", "typo", lease=SHORT) as lost,
        open_nats(options, "left", "nobody", lease=SHORT) as nobody,
        watching(frontend),
    ):
        async with watching(nobody) as views:
            left = await nobody.register(record(epoch=await nobody.claim("P-0")))
            await until(lambda: bool(views) and "P-0" in views[-1])
        await left.close()
        held = await worker.register(record(epoch=await worker.claim("P-0")))
        await until_async(lambda: _are(lost, "prod", "test"))
        await discovery.report_waiting(lost, lambda: "", partial(_explain_no_calls, lost))
        assert capfd.readouterr().err == ""
        await discovery.report_waiting(lost, lambda: "a frontend", partial(_explain_no_calls, lost))
        waits = "still waiting for a frontend in --namespace"
        assert capfd.readouterr().err == (
            f"{waits} prdo of NATS at {server.url}. Other namespaces "
            "in use: prod, test. Is --namespace right, here and there?\n"
        )
        await discovery.report_waiting(
            frontend, lambda: "a frontend", partial(_explain_no_calls, frontend)
        )
        there = f"{waits} test of NATS at {server.url} (one is there and does not use this worker:"
        assert there in capfd.readouterr().err
        assert not await nobody.watched()
        await held.close()
        server.stop()
        await until(lambda: lost.status.away)
        assert await lost.others() == ()


async def _are(discovery: NatsDiscovery, *others: str) -> bool:
    return await discovery.others() == others


async def until_async(condition: Callable[[], Awaitable[bool]]) -> None:
    async with asyncio.timeout(20):
        while not await condition():
            await asyncio.sleep(0.02)


async def test_a_second_server_in_one_namespace_is_refused(server: NatsServer) -> None:
    """Another namespace is free. Proved with ``find_conflict`` finding none."""
    config = launch.resolve(Config(engine="fake", pattern="E/P/D", join=server.url, namespace="a"))
    async with open_nats(Config(join=server.url), "a", "worker") as worker:
        mine = record(epoch=await worker.claim("P-0"))
        pid = os.getpid()
        mine = msgspec.structs.replace(mine, pid=pid, host=host_id(), begun=process_start(pid))
        held = await worker.register(mine)
        with pytest.raises(InvalidConfig, match=r"--namespace a\. .*another --namespace; or"):
            await launch.check_names_free(config)
        await launch.check_names_free(msgspec.structs.replace(config, namespace="b"))
        await held.close()


async def test_losing_nats_is_logged_once_and_so_is_its_return(
    server: NatsServer, caplog: pytest.LogCaptureFixture
) -> None:
    """However many connections a process has, and whatever else it cannot do meanwhile. Proved by
    letting each of them log, and by logging leases too."""
    config = Config(join=server.url, request_plane="nats")
    async with (
        open_discovery(config, "test", "secret") as one,
        open_planes(config, "test") as planes,
    ):
        held = await one.register(record(epoch=await one.claim("P-0")))
        server.stop()
        await until(lambda: planes.away and one.status.away)
        tried = held._tried
        await until(lambda: held._tried > tried + 0.5)  # several renewals, and dials
        server.start()
        await until(lambda: not (planes.away or one.status.away))
        await held.close()
    told = [line.getMessage() for line in caplog.records if line.levelno >= logging.WARNING]
    assert told == [
        f"lost the connection to NATS at {server.url}",
        f"reconnected to NATS at {server.url}",
    ]
