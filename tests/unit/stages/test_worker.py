"""When the id of a worker may be taken."""

import asyncio
import os
import subprocess
from pathlib import Path

import pytest

from triptych.config import Config
from triptych.engines.base import EngineReport, Loaded
from triptych.errors import Draining, InvalidConfig
from triptych.messages import Job, Sampling, Work, WorkerRecord
from triptych.runtime.directory import Directory
from triptych.runtime.host import begun, here
from triptych.stages import worker
from triptych.stages.worker import _check_free
from triptych.topology import Role
from triptych.transfer.exchange import Exchange


@pytest.fixture
def directory(tmp_path):
    return Directory(tmp_path)


def register(directory, pid, **fields):
    files, told = directory.files, {"host": here(), "begun": begun(pid)} | fields
    record = WorkerRecord("PD-0", "PD", files.claim("PD-0"), "10.0.0.2:1", pid, "m", **told)
    files.write(record)
    return record


@pytest.fixture
def zombie():
    """A process that ended and that nobody has waited for: its number, and when it was begun."""
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
    with pytest.raises(InvalidConfig, match="--index"):
        await _check_free(directory, "PD-0")


async def test_the_id_of_a_dead_one_is_free_before_its_lease_is_over(directory, ended):
    register(directory, ended, begun=7)
    assert "PD-0" in await directory.view()
    await _check_free(directory, "PD-0")


async def test_a_dead_one_that_nobody_has_waited_for_is_dead(directory, zombie):
    pid, begun = zombie
    register(directory, pid, begun=begun)
    await _check_free(directory, "PD-0")


async def test_a_later_process_of_the_same_number_is_another(directory):
    """Numbers come back, in containers at once: the process must be the one of the record."""
    register(directory, os.getpid(), begun=begun(os.getpid()) - 1)
    await _check_free(directory, "PD-0")


async def test_a_process_of_another_host_is_not_looked_for_here(tmp_path, capfd):
    """Its lease is waited for: it ends, and the id is free."""
    directory = Directory(tmp_path, lease=0.5)
    register(directory, os.getpid(), host="gpu-2 other 1")
    await _check_free(directory, "PD-0")
    assert await directory.view() == {}
    assert "PD-0 is known on gpu-2: waiting" in capfd.readouterr().err


async def test_an_id_that_lives_on_another_host_is_refused_with_its_place(directory, monkeypatch):
    """Its pid says nothing here. Proved by looking at the pid alone: the id is then taken."""
    monkeypatch.setattr(worker, "WAIT_LEASES", 0.1)
    record = register(directory, 2**22 + 1, host="gpu-2 other 1", begun=7)
    lease = await directory.register(record)
    with pytest.raises(InvalidConfig, match=r"on gpu-2 \(10.0.0.2:1, process \d+\).*--index"):
        await _check_free(directory, "PD-0")
    await lease.close()


@pytest.mark.parametrize(
    ("end", "code"), [("stop", 0), ("fenced", worker.FENCED), ("died", worker.ENGINE_DIED)]
)
async def test_what_ends_a_worker_and_with_which_code(end, code):
    drained = []

    class Lease:
        async def update(self, state):
            drained.append(state)

    class Server:
        async def drain(self, seconds):
            drained.append(seconds)

    class Room:
        draining = False

    ends = worker.Ends(asyncio.Event(), asyncio.Event(), asyncio.Event())
    asyncio.get_running_loop().call_soon(getattr(ends, end).set)
    assert await worker._until_stopped(ends, Room(), Server(), Lease(), 7.0) == code
    assert drained == (["draining", 7.0] if end == "stop" else [])


async def test_a_worker_whose_engine_died_sends_what_comes_elsewhere():
    """As one that drains does: a request that meets it has lost nothing, and may be lost twice."""
    died = asyncio.Event()
    loaded = Loaded(None, None, EngineReport, lambda: None, died)
    dead = worker.Worker(Config(), Role("PD"), "PD-0", 1, loaded, None, Exchange("shm", "PD-0", 1))
    died.set()
    with pytest.raises(Draining):
        await dead.answer(Job(Work("w", (1,), (), Sampling(seed=1))), None)
