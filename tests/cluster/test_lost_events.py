"""F21 among real processes: a frontend that misses and mixes up what workers have cached.

The frontend's parts are built here, over the workers of a server, with a listener that loses events
and gives others in the wrong order. How fast that is noticed, tests/contract/test_events.py shows.
"""

import asyncio
import random

from support import pictures
from support.promises import unharmed
from support.servers import serving
from triptych.config import Config, KvSettings
from triptych.messages import MediaItem, Sampling, Work
from triptych.pipeline.kv.routing import KvRouting
from triptych.pipeline.membership import Membership
from triptych.pipeline.run import Pipeline
from triptych.runtime.directory import Directory
from triptych.runtime.events import open_subscriber
from triptych.runtime.planes import Planes
from triptych.topology import Topology

PATTERN = "E/P*2/D*2"
SECRET = "s" * 32
TALKS, TURNS, TOKENS = 12, 4, 24


class Unreliable:
    """Every fourth event is lost, and every other fourth comes after the one that follows it."""

    def __init__(self, listener):
        self._listener = listener
        self._count = 0
        self._late = []

    def subscribe(self, worker, epoch, address, hear):
        def some(change):
            self._count += 1
            if self._count % 4 == 0:
                return
            if self._count % 4 == 2:
                self._late.append(change)
                return
            hear(change)
            while self._late:
                hear(self._late.pop())

        return self._listener.subscribe(worker, epoch, address, some)


async def talk(pipeline, number):
    """One conversation about a picture; the tokens of every turn."""
    rng = random.Random(number)
    media = (MediaItem("image", 1, pictures.encoded(pictures.draw(number % 4))),)
    prompt = [rng.randrange(100, 300) for _ in range(40)]
    answers = []
    for turn in range(TURNS):
        made = []
        work = Work("w", tuple(prompt), media, Sampling(seed=number, max_tokens=TOKENS))
        await pipeline.run(work, lambda delta, made=made: made.extend(delta.ids))
        answers.append(made)
        prompt += made + [rng.randrange(100, 300) for _ in range(10 * turn)]
    return answers


async def talks(run_dir, listener=None, kv=None):
    directory, topology = Directory(run_dir, SECRET), Topology.parse(PATTERN)
    [model] = {record.model for record in (await directory.view()).values()}
    routing = "kv" if kv else "round-robin"
    async with Membership(
        topology, directory, SECRET, routing, model, kv=kv, listener=listener
    ) as membership:
        async with asyncio.timeout(30):
            while len(membership.peers) < 5:
                await asyncio.sleep(0.01)
        pipeline = Pipeline(topology, membership, kv=kv)
        return await asyncio.gather(*(talk(pipeline, number) for number in range(TALKS)))


async def misled(run_dir):
    kv = KvRouting(KvSettings(), max_local_prefill=64)
    listener = open_subscriber(Config(event_plane="zmq"), Planes(), SECRET)
    try:
        return await talks(run_dir, Unreliable(listener), kv), kv.counters
    finally:
        await listener.close()


def test_f21_events_lost_and_reordered_never_give_wrong_tokens(tmp_path):
    """Caches are small, so that the frontend routes by stale events. Guard: PrefixGone among
    what the walk is taken again for (without it requests fail); that the engine looks whether it
    holds what it is told to recall, tests/contract/engines/test_recall.py shows."""
    flags = ["--engine=fake", "--enable-multimodal", "--fake-decode", "--fake-kv-blocks=96"]
    flags += [f"--pattern={PATTERN}", "--routing=kv", "--event-plane=zmq", f"--run-dir={tmp_path}"]
    with serving(*flags, env={"TRIPTYCH_SECRET": SECRET}) as server, unharmed(server):
        wanted = asyncio.run(talks(tmp_path))
        assert len({tuple(turn) for one in wanted for turn in one}) == TALKS * TURNS
        for _ in range(2):  # the second time with caches that are full
            answers, counters = asyncio.run(misled(tmp_path))
            assert answers == wanted
            assert counters["changes_missed"] > 0
        assert counters["matched_blocks"] > 0
