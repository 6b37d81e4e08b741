"""Who counts as a worker that can be asked, whatever becomes of its lease."""

import asyncio
import contextlib
from typing import ClassVar

import msgspec
import pytest

from support.disks import small_disk
from support.site import SECRET, Site
from triptych.messages import Sampling, Work, WorkerRecord
from triptych.pipeline.membership import Membership
from triptych.runtime.directory import Directory, WorkerFiles
from triptych.runtime.discovery import DiscoveryStatus
from triptych.runtime.server import CallServer
from triptych.topology import Topology

LEASE = 1.0


async def until(condition):
    async with asyncio.timeout(20):
        while not condition():
            await asyncio.sleep(0.01)


async def test_f25_a_full_disk_cuts_no_stream_and_requests_are_served(tmp_path, monkeypatch):
    """A stream runs while the disk of the run directory is full for three leases, and nothing of it
    is computed twice; new requests are served as well; with free space all is as before. Proved
    without both guards (each is shown alone by a test of its own): the stream is lost."""
    monkeypatch.setattr("triptych.runtime.lease.RENEW_SECONDS", 0.05)
    monkeypatch.setattr("triptych.runtime.directory.POLL_SECONDS", 0.02)
    with small_disk(tmp_path / "disk") as disk:
        site = Site(disk.path, "E/P/D")
        site.directory = Directory(disk.path, lease=LEASE)
        async with site:
            tokens, ids = 10_000, []
            work = Work("w", (1, 2, 3), (), Sampling(seed=1, max_tokens=tokens))
            async with asyncio.TaskGroup() as group:
                run = site.pipeline.run(work, lambda delta: ids.extend(delta.ids))
                stream = group.create_task(run)
                await until(lambda: ids)
                disk.fill()
                clock = asyncio.get_running_loop().time
                full = clock()
                await until(lambda: site.membership.discovery_status.away)
                while clock() < full + 3 * LEASE:
                    short = msgspec.structs.replace(work, sampling=Sampling(seed=1, max_tokens=2))
                    await site.pipeline.run(short, lambda delta: None)
                    await asyncio.sleep(0.05)
                begun = len(ids)
                disk.free()
                await until(lambda: not site.membership.discovery_status.away)
                await until(lambda: len(WorkerFiles(disk.path, lease=LEASE).view()) == 3)
                assert not site.membership.missing()
                await until(lambda: len(ids) > begun)
                assert not stream.done()
                stream.cancel()
            assert ids == list(range(100, 100 + len(ids)))
            long = [name for name, job in site.jobs if job.work.sampling.max_tokens == tokens]
            assert long == ["P-0", "D-0"]
            await site.all_free()


class Shown:
    """Discovery that shows what a test says."""

    status = DiscoveryStatus("here", False)
    rejected: ClassVar[dict[str, WorkerRecord]] = {}

    def __init__(self):
        self.views = asyncio.Queue()

    async def watch(self):
        while True:
            yield await self.views.get()


@contextlib.asynccontextmanager
async def worker(epoch=1):
    async def nothing(ask, reply): ...

    server = CallServer(nothing, SECRET, "PD-0", epoch)
    address = await server.start("127.0.0.1", 0)
    try:
        yield WorkerRecord("PD-0", "PD", epoch, address, 1, "m")
    finally:
        await server.close()


@contextlib.asynccontextmanager
async def seen(*records):
    """A membership that these were shown to, once it has met them."""
    discovery = Shown()
    async with Membership(Topology.parse("E/PD"), discovery, SECRET, "round-robin", "m") as members:
        discovery.views.put_nowait({record.id: record for record in records})
        await until(lambda: len(members.peers) == len(records))
        yield members, lambda *left: discovery.views.put_nowait({one.id: one for one in left})


async def test_f25_a_connection_that_beats_is_life_though_the_lease_ran_out():
    """Until it is gone, and then for good. Proved by dropping workers that are not in the view."""
    async with worker() as record, seen(record) as (members, show):
        [peer] = members.peers
        show()
        await until(lambda: not members._view)
        await asyncio.sleep(0.1)
        assert members.peers == (peer,)
        assert not any(connection.closing for connection in peer.connections)
        peer.connections[0].abort("a test")
        await until(lambda: not members.peers)
        assert not members._joining


async def test_another_incarnation_takes_the_place_of_one_that_still_beats():
    async with worker() as old, worker(2) as new, seen(old) as (members, show):
        [before] = members.peers
        show(new)
        await until(lambda: [peer.record for peer in members.peers] == [new])
        assert all(connection.closing for connection in before.connections)


@pytest.mark.parametrize("change", [{"model": "other"}, {"role": "E"}], ids=["model", "role"])
async def test_a_connection_to_a_former_worker_is_dropped(change):
    """Proved by dropping no worker."""
    async with worker() as record, seen(record) as (members, show):
        show(msgspec.structs.replace(record, epoch=2, **change))
        await until(lambda: not members.peers)
