"""What every discovery does: leases, epochs, fencing, views."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import sys
import time
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import pytest

from triptych.errors import InvalidConfig, StartError
from triptych.messages import WorkerRecord
from triptych.runtime import discovery
from triptych.runtime.discovery import LEASE_SECONDS, Directory


@pytest.fixture(autouse=True)
def fast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(discovery, "RENEW_SECONDS", 0.05)
    monkeypatch.setattr(discovery, "POLL_SECONDS", 0.02)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "run" / "workers"


@pytest.fixture
def directory(path: Path) -> Directory:
    return Directory(path)


class Clock:
    """One that moves when the test says so."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def record(worker: str = "P-0", epoch: int = 1) -> WorkerRecord:
    return WorkerRecord(worker, "P", epoch, "127.0.0.1:9", 42, "model")


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not condition():
            await asyncio.sleep(0.01)


async def renewed(directory: Directory, clock: Clock) -> None:
    """Wait until the lease of P-0 is as long as it can be now."""
    end = str(clock.now + LEASE_SECONDS).encode()
    await until(lambda: end in directory.file("P-0").read_bytes())


@contextlib.asynccontextmanager
async def watching(directory: Directory) -> AsyncIterator[list[dict[str, WorkerRecord]]]:
    views: list[dict[str, WorkerRecord]] = []

    async def watch() -> None:
        async for view in directory.watch():
            views.append(view)

    task = asyncio.create_task(watch())
    try:
        yield views
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def test_a_registered_worker_is_seen_by_others_until_it_leaves(
    directory: Directory, path: Path
) -> None:
    mine = record(epoch=directory.claim("P-0"))
    lease = await directory.register(mine)
    assert Directory(path).view() == {"P-0": mine}
    await lease.close()
    assert Directory(path).view() == {}
    await lease.close()


async def test_watching_gives_the_view_and_every_change_of_it(
    directory: Directory, path: Path
) -> None:
    async with watching(Directory(path)) as views:
        await until(lambda: views == [{}])
        one = record("P-0", directory.claim("P-0"))
        lease = await directory.register(one)
        await until(lambda: views[-1] == {"P-0": one})
        await lease.update(state="draining")
        await until(lambda: bool(views[-1]) and views[-1]["P-0"].state == "draining")
        await asyncio.sleep(0.2)
        assert len(views) == 3  # renewing changes nothing that readers see
        await lease.close()
        await until(lambda: views[-1] == {})


async def test_epochs_only_grow(directory: Directory, path: Path) -> None:
    epochs = [Directory(path).claim("P-0") for _ in range(20)]
    assert epochs == sorted(set(epochs))
    lease = await directory.register(record(epoch=directory.claim("P-0")))
    await lease.close()
    assert directory.claim("P-0") > lease.record.epoch


def test_epochs_grow_even_when_the_directory_was_lost(directory: Directory, path: Path) -> None:
    before = directory.claim("P-0")
    shutil.rmtree(path)
    time.sleep(0.01)
    assert directory.claim("P-0") > before


def _claim_many(path: str) -> list[int]:
    return [Directory(path).claim("P-0") for _ in range(50)]


def test_processes_that_race_get_different_epochs(path: Path) -> None:
    with ProcessPoolExecutor(4, mp_context=get_context("forkserver")) as pool:
        claimed = list(pool.map(_claim_many, [str(path)] * 4))
    for mine in claimed:
        assert mine == sorted(mine)
    everything = [epoch for mine in claimed for epoch in mine]
    assert len(set(everything)) == len(everything)
    assert Directory(path).claim("P-0") > max(everything)


async def test_a_newer_claim_fences_the_older_worker(directory: Directory, path: Path) -> None:
    old = await directory.register(record(epoch=directory.claim("P-0")))
    other = await directory.register(record("P-1", directory.claim("P-1")))
    newer = Directory(path)
    epoch = newer.claim("P-0")
    async with asyncio.timeout(20):
        await old.fenced.wait()
    lease = await newer.register(record(epoch=epoch))
    await old.update(state="draining")  # says nothing any more
    await old.close()  # and takes nobody else's place away
    assert Directory(path).view()["P-0"] == record(epoch=epoch)
    assert not lease.fenced.is_set()
    assert not other.fenced.is_set()
    await lease.close()
    await other.close()


async def test_an_older_epoch_cannot_register(directory: Directory) -> None:
    old, new = directory.claim("P-0"), directory.claim("P-0")
    with pytest.raises(StartError, match="P-0"):
        await directory.register(record(epoch=old))
    lease = await directory.register(record(epoch=new))
    with pytest.raises(StartError):
        await directory.register(record(epoch=old))
    await lease.close()


def test_a_lease_that_is_not_renewed_ends(path: Path, clock: Clock) -> None:
    directory = Directory(path, clock=clock)
    directory.claim("P-0")
    directory.write(record())
    assert set(directory.view()) == {"P-0"}
    clock.now += LEASE_SECONDS + 1
    assert directory.view() == {}


async def test_a_renewed_lease_does_not_end(path: Path, clock: Clock) -> None:
    directory = Directory(path, clock=clock)
    lease = await directory.register(record(epoch=directory.claim("P-0")))
    reader = Directory(path, clock=clock)
    for _ in range(4):
        clock.now += LEASE_SECONDS * 0.6
        await renewed(directory, clock)
        assert reader.view() == {"P-0": lease.record}
    assert not lease.fenced.is_set()
    await lease.close()


WORKER = """
import asyncio, sys
from triptych.messages import WorkerRecord
from triptych.runtime import discovery

async def main():
    discovery.RENEW_SECONDS = 0.05
    directory = discovery.Directory(sys.argv[1], lease=1.0)
    epoch = directory.claim("P-0")
    lease = await directory.register(WorkerRecord("P-0", "P", epoch, "a:1", 1, "m"))
    print("here", flush=True)
    await lease.fenced.wait()
    await lease.close()
    sys.exit(3)

asyncio.run(main())
"""


async def test_a_worker_that_was_stopped_past_its_lease_is_fenced(path: Path) -> None:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", WORKER, str(path), stdout=asyncio.subprocess.PIPE
    )
    assert process.stdout is not None
    try:
        assert await process.stdout.readline() == b"here\n"
        reader = Directory(path, lease=1.0)
        assert set(reader.view()) == {"P-0"}
        process.send_signal(signal.SIGSTOP)
        await until(lambda: reader.view() == {})
        await asyncio.sleep(0.5)
        process.send_signal(signal.SIGCONT)
        async with asyncio.timeout(20):
            assert await process.wait() == 3
        assert reader.view() == {}
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()


async def test_while_discovery_is_away_the_last_view_and_the_leases_stay(
    path: Path, clock: Clock
) -> None:
    directory = Directory(path, clock=clock)
    lease = await directory.register(record(epoch=directory.claim("P-0")))
    reader = Directory(path, clock=clock)
    assert reader.view() == {"P-0": lease.record}
    os.rename(path, path.parent / "away")
    for _ in range(15):
        clock.now += LEASE_SECONDS * 0.8  # a minute in all
        await until(lambda: lease._tried == clock.now)
        assert reader.view() == {"P-0": lease.record}
    os.rename(path.parent / "away", path)
    assert reader.view() == {"P-0": lease.record}  # though the file says that it is over
    await renewed(directory, clock)
    assert reader.view() == {"P-0": lease.record}
    assert not lease.fenced.is_set()
    await lease.close()
    assert reader.view() == {}


def test_a_worker_that_died_while_discovery_was_away_is_dropped_after_its_return(
    path: Path, clock: Clock
) -> None:
    directory = Directory(path, clock=clock)
    directory.claim("P-0")
    directory.write(record())
    assert set(directory.view()) == {"P-0"}
    os.rename(path, path.parent / "away")
    clock.now += LEASE_SECONDS * 2
    assert set(directory.view()) == {"P-0"}
    os.rename(path.parent / "away", path)
    assert set(directory.view()) == {"P-0"}
    clock.now += LEASE_SECONDS + 1
    assert directory.view() == {}


@pytest.mark.parametrize("worker", ["", "../P-0", "a/b", ".hidden", "a b", "x" * 101, "a\n"])
async def test_an_id_that_is_no_file_name_is_refused(directory: Directory, worker: str) -> None:
    with pytest.raises(InvalidConfig):
        directory.claim(worker)
    with pytest.raises(InvalidConfig):
        await directory.register(record(worker))


def test_a_view_before_there_is_anything_is_empty(directory: Directory) -> None:
    assert directory.view() == {}
    assert not os.path.exists(directory.path)
