"""When a worker id is free, what ends a worker, and what it reports of its cache."""

import asyncio
import math
import os
import subprocess
from pathlib import Path

import pytest

from triptych.blocks import hash_blocks, hash_salt
from triptych.checkpoint import packaged_folder
from triptych.config import Config
from triptych.engines.base import EngineReport, LoadedEngine, find_engine
from triptych.errors import Draining, InvalidConfig, StartError
from triptych.host import host_id, host_name, process_start
from triptych.messages import Job, Sampling, WatchCache, Work, WorkerRecord
from triptych.runtime import discovery
from triptych.runtime.connection import WorkerConnection
from triptych.runtime.directory import Directory
from triptych.runtime.server import CallServer
from triptych.stages import health, process, worker
from triptych.stages.process import _check_id_is_free
from triptych.topology import Role
from triptych.transfer.base import Array
from triptych.transfer.client import TransferClient


def empty(dtype, shape):
    return Array(memoryview(bytearray(4 * math.prod(shape))), dtype, shape)


@pytest.fixture
def directory(tmp_path):
    return Directory(tmp_path)


def register(directory, pid, **fields):
    files, told = directory.files, {"host": host_id(), "begun": process_start(pid)} | fields
    record = WorkerRecord("PD-0", "PD", files.claim("PD-0"), "10.0.0.2:1", pid, "m", **told)
    files.write(record)
    return record


@pytest.fixture
def zombie():
    """A zombie process: its pid, and when it started."""
    with subprocess.Popen(["true"]) as process:
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        fields = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()
        yield process.pid, int(fields[19])


@pytest.fixture
def ended():
    with subprocess.Popen(["true"]) as process:
        pass
    return process.pid


async def test_the_id_of_a_living_worker_is_refused(directory):
    register(directory, os.getpid())
    with pytest.raises(InvalidConfig, match=r"in --run-dir /.*--index, or another --run-dir$"):
        await _check_id_is_free(directory, "PD-0")


async def test_f24_a_record_of_another_secret_takes_no_id_and_is_warned_of(tmp_path, capfd):
    """Proved with ``rejected`` as part of the view. ``serve`` looks at it in a run directory, where
    another server's secret is one of its own."""
    register(Directory(tmp_path, "theirs"), os.getpid())
    ours = Directory(tmp_path, "ours")
    await _check_id_is_free(ours, "PD-0")
    assert "worker PD-0 that is not signed with this TRIPTYCH_SECRET" in capfd.readouterr().err
    other = await discovery.find_conflict(ours, ["PD-0"], unsigned=True)
    assert other is not None
    assert other.pid == os.getpid()


async def test_the_id_of_a_dead_one_is_free_before_its_lease_is_over(directory, ended):
    register(directory, ended, begun=7)
    assert "PD-0" in await directory.view()
    await _check_id_is_free(directory, "PD-0")


async def test_a_zombie_process_counts_as_dead(directory, zombie):
    pid, begun = zombie
    register(directory, pid, begun=begun)
    await _check_id_is_free(directory, "PD-0")


async def test_a_later_process_of_the_same_number_is_another(directory):
    """Numbers come back, in containers at once: the process must be the one of the record."""
    register(directory, os.getpid(), begun=process_start(os.getpid()) - 1)
    await _check_id_is_free(directory, "PD-0")


async def test_a_process_of_another_host_is_not_looked_for_here(tmp_path, capfd):
    """Its lease is waited for: it ends, and the id is free."""
    directory = Directory(tmp_path, lease=0.5)
    register(directory, os.getpid(), host="gpu-2 other 1")
    await _check_id_is_free(directory, "PD-0")
    assert await directory.view() == {}
    assert "PD-0 is registered on gpu-2: waiting" in capfd.readouterr().err


async def test_an_id_that_lives_on_another_host_is_refused_with_its_place(directory, monkeypatch):
    """Its pid says nothing here. Proved by looking at the pid alone: the id then seems free."""
    monkeypatch.setattr(discovery, "WAIT_LEASES", 0.1)
    record = register(directory, 2**22 + 1, host="gpu-2 other 1", begun=7)
    lease = await directory.register(record)
    with pytest.raises(InvalidConfig, match=r"on gpu-2 \(10.0.0.2:1, process \d+\).*--index"):
        await _check_id_is_free(directory, "PD-0")
    await lease.close()


@pytest.mark.parametrize(
    ("end", "code"),
    [
        ("stop", 0),
        ("fenced", process.FENCED),
        ("died", process.ENGINE_DIED),
        ("lost", process.EXIT_NATS_LOST),
        ("hung", process.ENGINE_DIED),
    ],
)
async def test_what_ends_a_worker_and_with_which_code(end, code):
    drained = []

    class Lease:
        async def update(self, state):
            drained.append(state)

    class Server:
        async def drain(self, seconds):
            drained.append(seconds)

    class Drained:
        def drain(self):
            pass

    ends = process.StopReasons(*(asyncio.Event() for _ in range(5)))
    asyncio.get_running_loop().call_soon(getattr(ends, end).set)
    assert await process.serve_until_stopped(ends, Drained(), Server(), Lease(), 7.0) == code
    assert drained == (["draining", 7.0] if end == "stop" else [])


@pytest.mark.parametrize(
    ("error", "code"), [(StartError("the canary fails"), 2), (OSError("no port"), 1)]
)
async def test_the_close_of_an_engine_has_a_deadline_after_a_failed_start(
    tmp_path, monkeypatch, caplog, error, code
):
    """Proved without ``_bound_close_after_error``: a close that blocks never ends."""
    happened = []

    async def fails(*_):
        raise error

    def load(*_):
        return LoadedEngine(None, None, EngineReport, lambda: happened.append("closed"))

    monkeypatch.setattr(process, "_load", load)
    monkeypatch.setattr(health, "check_start", fails)
    config = Config(engine="fake", model=str(packaged_folder("qwen")), run_dir=str(tmp_path))
    with pytest.raises(type(error)):
        await process.run_worker(config, Role("EPD"), "EPD-0", "s" * 32, ending=happened.append)
    assert happened == [code, "closed"]
    assert str(error) in caplog.text


@pytest.mark.parametrize("part", ["encoder", "engine"])
async def test_each_part_that_hangs_is_found_while_the_other_answers(part, monkeypatch):
    """Fails with one pulse for both, or where the work of one counts for the other."""
    monkeypatch.setattr(health, "TICK", 0.005)
    encodes, generates = health.EngineHealth(), health.EngineHealth()

    async def hangs(*_):
        await asyncio.Event().wait()

    for probe in ("encode_canary", "generate_canary"):
        monkeypatch.setattr(health, probe, hangs)
    loaded = LoadedEngine(None, object(), EngineReport, lambda: None)
    hung = asyncio.Event()
    silent = {"encoder": encodes, "engine": generates}[part]
    other = generates if silent is encodes else encodes

    async def busy():
        while True:
            with other.call():
                await asyncio.sleep(0.001)

    working = asyncio.create_task(busy())
    with silent.call():
        await asyncio.wait_for(
            health.watch_for_hang(loaded, object(), encodes, generates, 0.05, hung), 10
        )
    assert hung.is_set()
    working.cancel()


async def test_a_worker_whose_engine_died_refuses_new_requests_so_that_they_migrate():
    """As one that drains does: a request that meets it has lost nothing, and may be lost twice."""
    died = asyncio.Event()
    loaded = LoadedEngine(None, None, EngineReport, lambda: None, died)
    dead = worker.Worker(
        Config(), Role("PD"), "PD-0", 1, loaded, None, TransferClient("shm", "PD-0", 1)
    )
    died.set()
    with pytest.raises(Draining):
        await dead.answer(Job(Work("w", (1,), (), Sampling(seed=1))), None)


async def test_a_cache_subscriber_receives_the_blocks_that_requests_leave(tmp_path):
    """And neither a watcher nor one that comes later holds up its drain. Proved with ``drain``
    leaving the reporter open."""
    loaded = find_engine("fake")(Config(engine="fake"), Role("PD"), empty, lambda what, share: None)
    transfers = TransferClient("shm", "PD-0", 1)
    one = worker.Worker(Config(engine="fake"), Role("PD"), "PD-0", 1, loaded, None, transfers)
    server = CallServer(one.answer, "secret", "PD-0", 1)
    connection = await WorkerConnection.open(
        await server.start("127.0.0.1", 0), "secret", "PD-0", 1
    )
    changes, deltas = [], []
    watch = connection.call(WatchCache(), changes.append)
    prompt = tuple(range(100, 140))
    job = Job(Work("w", prompt, (), Sampling(seed=1, max_tokens=20), salt="tenant"))
    async with asyncio.timeout(20):
        await connection.call(job, deltas.append).done()
        made = [id for delta in deltas for id in delta.ids]
        expected = list(hash_blocks(hash_salt("tenant"), [*prompt, *made][:-1], 16))
        while [held for change in changes for held in change.stored] != expected:
            await asyncio.sleep(0.002)
        report, counters = one.report(), one.report().counters
        assert report.host == host_name(host_id())
        assert (report.request_plane, report.event_plane) == ("tcp", "embedded")
        assert (counters["kv_blocks_reported"], counters["kv_watchers"]) == (3, 1)
        assert counters["kv_changes_sent"] == len(changes)
        one.drain()
        await watch.done()
        await connection.call(WatchCache(), changes.append).done()
        assert await server.drain(10)
    await connection.close()
    await server.close()
    await transfers.close()
    loaded.close()


async def test_a_worker_without_a_prefix_cache_has_nothing_to_watch():
    loaded = LoadedEngine(None, None, EngineReport, lambda: None)
    transfers = TransferClient("shm", "E-0", 1)
    one = worker.Worker(Config(), Role("E"), "E-0", 1, loaded, None, transfers)
    async with asyncio.timeout(10):
        await one.answer(WatchCache(), None)
    assert "kv_watchers" not in one.report().counters
    assert one.report().event_plane == ""
