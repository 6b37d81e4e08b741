"""Every way by which frontends learn what a worker has cached: in calls, over ZMQ, over NATS.

A real reporter publishes behind a real request plane, and a frontend's index is compared with the
reporter in the end. How often and in which messages does not matter here, only the outcome.
"""

import asyncio
import contextlib
import random

import msgspec
import pytest

from support.nats_server import nats_server
from triptych.config import Config, KvSettings
from triptych.messages import CacheChange, KvCleared, KvRemoved, KvStored
from triptych.pipeline.kv.index import watch_cache
from triptych.pipeline.kv.routing import KvRouting
from triptych.runtime.authentication import MessageMac
from triptych.runtime.connection import WorkerConnection
from triptych.runtime.events import open_publisher, open_subscriber
from triptych.runtime.nats import close, connect
from triptych.runtime.nats_events import SNAPSHOT_EVERY, NatsPublisher, NatsSubscriber
from triptych.runtime.planes import Planes
from triptych.runtime.server import CallServer
from triptych.stages.cache_reporter import CacheReporter, EventPlaneWatcher

SECRET = "s" * 32
PLANES = ["embedded", "zmq", "nats"]


@pytest.fixture(scope="module")
def nats():
    with nats_server() as server:
        yield server


class Worker:
    """A reporter that is fed by hand, and can be asked for the whole."""

    def __init__(self, reporter):
        self.reporter = reporter
        self.stored = 0

    async def answer(self, ask, reply):
        await self.reporter.watch(reply)

    def store(self, count=1):
        for _ in range(count):
            self.stored += 1
            tokens = (self.stored, self.stored)
            self.reporter.receive([KvStored((self.stored,), None, tokens, 2)])

    def remove(self, block):
        self.reporter.receive([KvRemoved((block,))])

    @property
    def held(self):
        return set(self.reporter.snapshot().stored)


class Frontend:
    """What it knows of a worker. ``losing``: every third event does not arrive."""

    def __init__(self, connection, listener, events, epoch, losing=False):
        self.name, self.epoch, self.events = "P-0", epoch, events
        self.kv = KvRouting(KvSettings())
        self.call = connection.call
        self._count = 0
        self._losing = losing
        self._listener = listener
        self._task = asyncio.create_task(
            watch_cache(self, self.kv.index, self if listener else None)
        )

    def subscribe(self, worker, epoch, address, hear):
        def some(change):
            self._count += 1
            if not self._losing or self._count % 3:
                hear(change)

        return self._listener.subscribe(worker, epoch, address, some)

    @property
    def held(self):
        return set(self.kv.index._reported.workers.get("P-0", ()))

    async def close(self):
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)


class Site:
    def __init__(self, plane, nats, epoch):
        self.config = Config(event_plane=plane, join=nats.url if plane == "nats" else "")
        self.nats = nats
        self.epoch = epoch
        self.scope = contextlib.AsyncExitStack()

    async def __aenter__(self):
        self.planes = await self.reach()
        self.worker = Worker(CacheReporter(2, 100_000))
        server = CallServer(self.worker.answer, SECRET, "P-0", self.epoch)
        self.address = await server.start("127.0.0.1", 0)
        self.scope.push_async_callback(server.close)
        whole = self.worker.reporter.snapshot
        teller = open_publisher(self.config, self.planes, SECRET, "P-0", self.epoch, whole)
        self.events = ""
        if teller is not None:
            self.scope.push_async_callback(teller.close)
            self.events = teller.address
            telling = asyncio.create_task(self.worker.reporter.watch(EventPlaneWatcher(teller)))
            self.scope.callback(telling.cancel)
        return self

    async def __aexit__(self, *_):
        await self.scope.aclose()

    async def reach(self):
        if self.config.event_plane != "nats":
            return Planes()
        client = await connect(Config(join=self.nats.url), "tests")
        self.scope.push_async_callback(close, client)
        return Planes(client)

    async def frontend(self, secret=SECRET, **how):
        planes = await self.reach()
        connection = await WorkerConnection.open(self.address, SECRET, "P-0", self.epoch)
        self.scope.push_async_callback(connection.close)
        listener = open_subscriber(self.config, planes, secret)
        if listener is not None:
            self.scope.push_async_callback(listener.close)
        frontend = Frontend(connection, listener, self.events, self.epoch, **how)
        self.scope.push_async_callback(frontend.close)
        return frontend

    async def agree(self, *frontends):
        """Until all of them know what the worker holds."""
        async with asyncio.timeout(30):
            while self.worker.reporter._scheduled or any(
                frontend.held != self.worker.held for frontend in frontends
            ):
                await asyncio.sleep(0.02)


@pytest.fixture(params=PLANES)
async def site(request, nats):
    epoch = random.randrange(1, 1 << 40)  # the server is shared: each has a subject of its own
    async with Site(request.param, nats, epoch) as site:
        yield site


async def test_stored_and_removed_blocks_reach_the_frontend(site):
    frontend = await site.frontend()
    site.worker.store(5)
    await site.agree(frontend)
    site.worker.remove(2)
    site.worker.store(300)
    await site.agree(frontend)
    assert len(frontend.held) == 304


async def test_a_new_frontend_catches_up_and_all_agree(site):
    site.worker.store(2000)
    first = await site.frontend()
    await site.agree(first)
    site.worker.store(700)
    second = await site.frontend()
    for _ in range(50):
        site.worker.store(3)
        site.worker.remove(site.worker.stored - 2)
        await asyncio.sleep(0)
    await site.agree(first, second)


async def test_f21_lost_events_cost_one_snapshot_request_only(site):
    """Every third is lost on the way. Guard: the check of sequence numbers in ``receive``
    (without it the lost blocks are never known)."""
    frontend = await site.frontend(losing=True)
    await site.agree(frontend)
    for _ in range(40):
        site.worker.store()
        await asyncio.sleep(0.01)
    await site.agree(frontend)
    # In a call nothing can be lost, so that plane has no gaps to show.
    assert bool(frontend.kv.counters["changes_missed"]) == bool(site.events)


async def test_cleared_blocks_are_forgotten(site):
    frontend = await site.frontend()
    site.worker.store(10)
    await site.agree(frontend)
    site.worker.reporter.receive([KvCleared()])
    site.worker.store(3)
    await site.agree(frontend)
    assert len(frontend.held) == 3


async def test_ten_thousand_changes_arrive(site):
    frontends = [await site.frontend() for _ in range(2)]
    for number in range(10_000):
        site.worker.store()
        if number % 100 == 0:
            await asyncio.sleep(0)
    await site.agree(*frontends)
    assert len(site.worker.held) == 10_000


async def test_without_the_secret_no_event_is_received_over_zmq(nats):
    """Guard: CURVE (without the keys in zmq_events anyone receives events)."""
    async with Site("zmq", nats, 1) as site:
        heard, told = [], []
        for secret, list_of in (("x" * 32, heard), (SECRET, told)):
            listener = open_subscriber(site.config, site.planes, secret)
            site.scope.push_async_callback(listener.close)
            listener.subscribe("P-0", 1, site.events, list_of.append)
        async with asyncio.timeout(10):
            while not told:
                site.worker.store()
                await asyncio.sleep(0.02)
        assert not heard


async def test_events_over_nats_go_on_when_it_comes_back_with_nothing(nats):
    """The server is restarted without its store. Guards: NatsPublisher and NatsSubscriber act
    on reconnects (without both, later events reach no frontend; one is enough here)."""
    with nats_server() as server:
        async with Site("nats", server, 1) as site:
            frontend = await site.frontend()
            site.worker.store(5)
            await site.agree(frontend)
            await asyncio.to_thread(server.restart)
            for _ in range(20):
                site.worker.store()
                await asyncio.sleep(0.05)
            await site.agree(frontend)


async def test_f24_rubbish_and_forged_events_in_the_stream_are_left_out(nats, caplog):
    """Guard: MessageMac.open (without it the forged whole is believed)."""
    forged = msgspec.msgpack.encode(CacheChange(sequence=1 << 40, stored=(1, 2, 3), snapshot=True))
    subject = "triptych.default.cache.P-0.77"
    sealed = MessageMac("a guess", "cache events", subject).seal(forged)
    async with Site("nats", nats, 77) as site:
        frontend = await site.frontend()
        site.worker.store(3)
        await site.agree(frontend)
        client = site.planes.client
        for message in (b"\xc1 rubbish", b"", forged, *[sealed] * 50):
            await client.publish(subject, message)
        site.worker.store(3)
        await site.agree(frontend)
    assert sum("an event that is forged" in line for line in caplog.messages) == 1


async def test_changes_are_published_where_the_snapshot_is_too_large_for_nats():
    """Guard: NatsPublisher goes on after a snapshot that is too large (where it ends there, the
    changes that came with it are never received)."""
    whole = CacheChange(sequence=1, stored=tuple(range(5000)), snapshot=True)
    with nats_server(extra="max_payload: 8192") as server:
        client = await connect(Config(join=server.url), "tests")
        teller = NatsPublisher(client, "default", SECRET, "P-0", 1, lambda: whole)
        listener, heard = NatsSubscriber(client, "default", SECRET), []
        listener.subscribe("P-0", 1, "nats", lambda change: heard.append(change.sequence))
        async with asyncio.timeout(20):
            while not teller._ready or teller._lost:
                await asyncio.sleep(0.02)
            for number in range(1, 2 * SNAPSHOT_EVERY + 1):
                teller.publish(CacheChange(sequence=number))
                while number % 100 == 0 and teller._waiting:
                    await asyncio.sleep(0)
            while len(heard) < 2 * SNAPSHOT_EVERY:
                await asyncio.sleep(0.02)
        assert heard == list(range(1, 2 * SNAPSHOT_EVERY + 1))
        for end in (listener.close(), teller.close(), close(client)):
            await end
