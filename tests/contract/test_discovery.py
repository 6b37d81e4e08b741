"""What every discovery does: leases, epochs, fencing, views. In a directory and on NATS."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import sys
import uuid
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import pytest

from support.nats_server import NatsServer, nats_server
from triptych.config import Config
from triptych.errors import InvalidConfig, StartError
from triptych.messages import WorkerRecord
from triptych.runtime import directory, lease
from triptych.runtime.directory import Directory
from triptych.runtime.discovery import Discovery
from triptych.runtime.lease import LEASE_SECONDS
from triptych.runtime.nats_discovery import open_nats

SECRET = "a cluster's secret"
SHORT = 2.0  # seconds of a lease, where a test waits for its end


@pytest.fixture(autouse=True)
def fast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lease, "RENEW_SECONDS", 0.05)
    monkeypatch.setattr(directory, "POLL_SECONDS", 0.02)


@contextlib.asynccontextmanager
async def reach(
    kind: str, where: str, namespace: str, lease: float, secret: str = SECRET
) -> AsyncIterator[Discovery]:
    if kind == "directory":
        yield Directory(where, secret, lease=lease)
        return
    options = Config(join=where)
    async with open_nats(options, namespace, "test", secret, lease=lease) as discovery:
        yield discovery


class Ground:
    """A place for one cluster, seen by as many as open it."""

    def __init__(self, kind: str, path: Path, server: NatsServer | None) -> None:
        self.kind = kind
        self.where = str(path / "run" / "workers") if server is None else server.url
        self.namespace = uuid.uuid4().hex
        self._server = server
        self._scope = contextlib.AsyncExitStack()

    @property
    def words(self) -> tuple[str, str, str]:
        return self.kind, self.where, self.namespace

    async def open(
        self, lease: float = LEASE_SECONDS, namespace: str = "", secret: str = SECRET
    ) -> Discovery:
        scope = reach(self.kind, self.where, namespace or self.namespace, lease, secret)
        return await self._scope.enter_async_context(scope)

    def go(self) -> None:
        """Away with discovery itself."""
        if self._server is not None:
            self._server.stop()
        else:
            Path(self.where).rename(f"{self.where}-away")

    def come_back(self) -> None:
        if self._server is not None:
            self._server.start()
        else:
            Path(f"{self.where}-away").rename(self.where)

    async def close(self) -> None:
        await self._scope.aclose()


@pytest.fixture(scope="module")
def shared_server() -> Iterator[NatsServer]:
    with nats_server() as server:
        yield server


@pytest.fixture(params=["directory", "nats"])
async def ground(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Ground]:
    server = request.getfixturevalue("shared_server") if request.param == "nats" else None
    ground = Ground(request.param, tmp_path, server)
    yield ground
    await ground.close()


@pytest.fixture(params=["directory", "nats"])
async def own_ground(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Ground]:
    """One that may go away."""
    with contextlib.ExitStack() as scope:
        server = None
        if request.param == "nats":
            server = scope.enter_context(nats_server(store=tmp_path / "store"))
        ground = Ground(request.param, tmp_path, server)
        yield ground
        await ground.close()


def record(worker: str = "P-0", epoch: int = 1) -> WorkerRecord:
    return WorkerRecord(worker, "P", epoch, "127.0.0.1:9", 42, "model")


async def until(condition: Callable[[], bool], seconds: float = 20) -> None:
    async with asyncio.timeout(seconds):
        while not condition():
            await asyncio.sleep(0.01)


@contextlib.asynccontextmanager
async def watching(discovery: Discovery) -> AsyncIterator[list[dict[str, WorkerRecord]]]:
    views: list[dict[str, WorkerRecord]] = []

    async def watch() -> None:
        async for view in discovery.watch():
            views.append(view)

    task = asyncio.create_task(watch())
    try:
        yield views
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def test_a_view_before_there_is_anything_is_empty(ground: Ground) -> None:
    discovery = await ground.open()
    assert await discovery.view() == {}


async def test_a_registered_worker_is_seen_by_others_until_it_leaves(ground: Ground) -> None:
    worker, reader = await ground.open(), await ground.open()
    mine = record(epoch=await worker.claim("P-0"))
    lease = await worker.register(mine)
    assert await reader.view() == {"P-0": mine}
    assert await (await ground.open()).view() == {"P-0": mine}
    await lease.close()
    assert await reader.view() == {}
    assert await (await ground.open()).view() == {}
    await lease.close()


async def test_watching_gives_the_view_and_every_change_of_it(ground: Ground) -> None:
    worker = await ground.open()
    async with watching(await ground.open()) as views:
        await until(lambda: views == [{}])
        one = record("P-0", await worker.claim("P-0"))
        lease = await worker.register(one)
        await until(lambda: views[-1] == {"P-0": one})
        await lease.update(state="draining")
        await until(lambda: bool(views[-1]) and views[-1]["P-0"].state == "draining")
        await asyncio.sleep(0.2)
        assert len(views) == 3  # renewing changes nothing that readers see
        await lease.close()
        await until(lambda: views[-1] == {})


async def test_epochs_only_grow(ground: Ground) -> None:
    one, other = await ground.open(), await ground.open()
    epochs = [await discovery.claim("P-0") for discovery in (one, other) * 10]
    assert epochs == sorted(set(epochs))
    lease = await one.register(record(epoch=await one.claim("P-0")))
    await lease.close()
    assert await other.claim("P-0") > lease.record.epoch


def _claim_many(words: tuple[str, str, str]) -> list[int]:
    async def claims() -> list[int]:
        async with reach(*words, LEASE_SECONDS) as discovery:
            return [await discovery.claim("P-0") for _ in range(50)]

    return asyncio.run(claims())


async def test_processes_that_race_get_different_epochs(ground: Ground) -> None:
    """Proved by writing over any revision: processes then get the same epochs."""
    loop = asyncio.get_running_loop()
    with ProcessPoolExecutor(4, mp_context=get_context("forkserver")) as pool:
        racing = [loop.run_in_executor(pool, _claim_many, ground.words) for _ in range(4)]
        claimed = await asyncio.gather(*racing)
    for mine in claimed:
        assert mine == sorted(mine)
    everything = [epoch for mine in claimed for epoch in mine]
    assert len(set(everything)) == len(everything)
    assert await (await ground.open()).claim("P-0") > max(everything)


async def test_a_newer_claim_fences_the_older_worker(ground: Ground) -> None:
    """Proved by letting a renewal write whatever epoch is there: no worker is fenced."""
    older, newer = await ground.open(), await ground.open()
    old = await older.register(record(epoch=await older.claim("P-0")))
    other = await older.register(record("P-1", await older.claim("P-1")))
    epoch = await newer.claim("P-0")
    async with asyncio.timeout(20):
        await old.fenced.wait()
    lease = await newer.register(record(epoch=epoch))
    await old.update(state="draining")  # says nothing any more
    await old.close()  # and removes no other worker's record
    assert (await (await ground.open()).view())["P-0"] == record(epoch=epoch)
    assert not lease.fenced.is_set()
    assert not other.fenced.is_set()
    await lease.close()
    await other.close()


async def test_an_older_epoch_cannot_register(ground: Ground) -> None:
    discovery = await ground.open()
    old, new = await discovery.claim("P-0"), await discovery.claim("P-0")
    with pytest.raises(StartError, match="P-0"):
        await discovery.register(record(epoch=old))
    lease = await discovery.register(record(epoch=new))
    with pytest.raises(StartError):
        await discovery.register(record(epoch=old))
    assert await discovery.view() == {"P-0": record(epoch=new)}
    await lease.close()


WORKER = """
import asyncio, sys
sys.path[:0] = ["tests", "."]
from contract.test_discovery import reach, record
from triptych.runtime import lease

async def main():
    lease.RENEW_SECONDS = 0.05
    async with reach(*sys.argv[1:4], float(sys.argv[4])) as discovery:
        held = await discovery.register(record(epoch=await discovery.claim("P-0")))
        print("here", flush=True)
        await held.fenced.wait()
        await held.close()
    sys.exit(3)

asyncio.run(main())
"""


@contextlib.asynccontextmanager
async def worker_apart(ground: Ground) -> AsyncIterator[asyncio.subprocess.Process]:
    """A worker in a process of its own, registered, with a short lease."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", WORKER, *ground.words, str(SHORT), stdout=asyncio.subprocess.PIPE
    )
    assert process.stdout is not None
    try:
        assert await process.stdout.readline() == b"here\n"
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()


async def test_a_worker_that_was_stopped_past_its_lease_is_fenced(ground: Ground) -> None:
    """Proved by never fencing a late worker: the process never ends."""
    async with worker_apart(ground) as process, watching(await ground.open(SHORT)) as views:
        await until(lambda: bool(views) and set(views[-1]) == {"P-0"})
        process.send_signal(signal.SIGSTOP)
        await until(lambda: views[-1] == {})
        await asyncio.sleep(0.5)
        process.send_signal(signal.SIGCONT)
        async with asyncio.timeout(20):
            assert await process.wait() == 3
        await until(lambda: views[-1] == {})


async def test_while_discovery_is_away_the_last_view_and_the_leases_stay(
    own_ground: Ground,
) -> None:
    """F14. Proved by counting time on while out of touch: the view is empty after a lease."""
    worker, reader = await own_ground.open(SHORT), await own_ground.open(SHORT)
    held = await worker.register(record(epoch=await worker.claim("P-0")))
    async with watching(reader) as views:
        await until(lambda: bool(views) and views[-1] == {"P-0": held.record})
        assert not reader.status.away
        own_ground.go()
        await until(lambda: reader.status.away)
        await asyncio.sleep(2 * SHORT)
        assert await reader.view() == {"P-0": held.record}
        own_ground.come_back()
        await until(lambda: not reader.status.away)
        await held.update(state="draining")
        await until(lambda: views[-1]["P-0"].state == "draining")
        assert {} not in views[1:]
        assert not held.fenced.is_set()
        await held.close()
        await until(lambda: views[-1] == {})


async def test_a_worker_that_died_while_discovery_was_away_is_dropped_after_its_return(
    own_ground: Ground,
) -> None:
    reader = await own_ground.open(SHORT)
    async with watching(reader) as views:
        async with worker_apart(own_ground) as process:
            await until(lambda: bool(views) and set(views[-1]) == {"P-0"})
            own_ground.go()
            await until(lambda: reader.status.away)
            process.kill()
            await process.wait()
        assert set(await reader.view()) == {"P-0"}
        own_ground.come_back()
        await until(lambda: views[-1] == {})


@pytest.mark.parametrize("worker", ["", "../P-0", "a/b", ".hidden", "a b", "x" * 101, "a\n", "a."])
async def test_an_id_that_is_not_a_name_is_refused(ground: Ground, worker: str) -> None:
    discovery = await ground.open()
    with pytest.raises(InvalidConfig):
        await discovery.claim(worker)
    with pytest.raises(InvalidConfig):
        await discovery.register(record(worker))


async def test_f24_a_record_without_our_signature_is_rejected(ground: Ground) -> None:
    """Its address may be a relay's. Proved with ``EntrySigner.decode`` that finds all signed."""
    ours, forger = await ground.open(), await ground.open(secret="a guess")
    forged = await forger.register(record("P-1", await forger.claim("P-1")))
    assert await ours.view() == {}
    assert dict(ours.rejected) == {"P-1": forged.record}
    async with asyncio.timeout(20), contextlib.aclosing(ours.watch()) as views:
        async for view in views:  # a reader hears when it comes and when it goes
            assert view == {}
            if not ours.rejected:
                break
            await forged.close()


async def test_f24_a_forged_record_replaces_no_worker(ground: Ground) -> None:
    """Nor does its epoch fence anybody. Proved with the check in ``newest`` (and ``get``) off."""
    ours, forger = await ground.open(), await ground.open(secret="a guess")
    genuine = await ours.register(record("P-0", await ours.claim("P-0")))
    forged = await forger.register(record("P-0", 1 << 60))
    await forged.close()
    async with asyncio.timeout(20):
        while (await ours.view()) != {"P-0": genuine.record} or ours.rejected:
            await asyncio.sleep(0.02)
    assert not genuine.fenced.is_set()
    assert await ours.claim("P-0") < 1 << 60
    await genuine.close()
