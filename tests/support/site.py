"""Workers of a few lines each behind real request-plane servers, and a pipeline over them."""

import asyncio
import contextlib

from triptych import blocks
from triptych.config import KvSettings
from triptych.errors import PrefixGone
from triptych.messages import (
    CacheChange,
    Delta,
    Embedding,
    EncodeResult,
    Handover,
    MediaMeta,
    MediaSpan,
    PromptInfo,
    Ticket,
    WatchCache,
    WorkerRecord,
)
from triptych.pipeline.kv.routing import KvRouting
from triptych.pipeline.membership import Membership
from triptych.pipeline.run import Pipeline
from triptych.runtime.directory import Directory
from triptych.runtime.server import CallServer
from triptych.topology import Topology

SECRET = "s" * 32


def ticket(number):
    return Ticket("w", 1, "shm", number, b"", (), 0, 0, 0.0)


class Site:
    """Workers of a topology in this process, and a pipeline over them."""

    block_size = 0

    def __init__(self, path, pattern, routing="round-robin", kv=None, resumes=False):
        self.resumes = resumes
        self.routing = routing
        self.kv = kv
        self.topology = Topology.parse(pattern)
        self.directory = Directory(path, SECRET)
        self.jobs = []
        self.held = 0
        self.prepared = False
        self.servers = {}
        self.scope = contextlib.AsyncExitStack()

    async def __aenter__(self):
        for group in self.topology.groups:
            for i in range(group.count):
                await self.start(f"{group.role}-{i}", group.role)
        self.membership = Membership(
            self.topology, self.directory, SECRET, self.routing, "m", kv=self.kv
        )
        await self.scope.enter_async_context(self.membership)
        async with asyncio.timeout(5):
            while self.membership.missing() or len(self.membership.peers) < len(self.servers):
                await asyncio.sleep(0.01)
        self.pipeline = Pipeline(self.topology, self.membership, kv=self.kv)
        return self

    async def __aexit__(self, *_):
        await self.scope.aclose()

    async def start(self, name, role):
        epoch = await self.directory.claim(name)
        server = CallServer(
            lambda ask, reply: self.answer(name, role, ask, reply), SECRET, name, epoch
        )
        self.scope.push_async_callback(server.close)
        address = await self.announced(name, await server.start("127.0.0.1", 0))
        size = self.block_size if role.phases else 0
        record = WorkerRecord(
            name,
            str(role),
            epoch,
            address,
            1,
            "m",
            block_size=size,
            can_prefill_from_cache=bool(size),
            resumes=self.resumes and bool(role.phases),
        )
        lease = await self.directory.register(record)
        self.scope.push_async_callback(lease.close)
        self.servers[name] = server

    async def announced(self, name, address):
        """Where callers are led."""
        return address

    @contextlib.contextmanager
    def holding(self):
        self.held += 1
        try:
            yield
        finally:
            self.held -= 1

    async def answer(self, name, role, job, reply):
        self.jobs.append((name, job))
        with self.holding():
            if role == "E":
                [item] = job.items
                assert job.work.media[item].data or self.prepared
                embedding = Embedding(self.meta(item, job.work.media[item]), ticket(item))
                reply.send(EncodeResult((embedding,), {"encode": 1.0}))
                await reply.wait_until_closed()
            elif role in ("P", "EP"):
                made = len(job.work.generated)
                done = job.work.sampling.max_tokens == made + 1
                delta = Delta((100 + made,), "length" if done else None)
                reply.send(Handover(delta, (), None if done else ticket(99)))
                if not done:
                    await reply.wait_until_closed()
            else:
                start = len(job.work.generated) + bool(job.handover)
                for i in range(start, job.work.sampling.max_tokens):
                    last = i == job.work.sampling.max_tokens - 1
                    reply.send(Delta((100 + i,), "length" if last else None))
                    await asyncio.sleep(0.005)

    def meta(self, index, item):
        return MediaMeta(bytes([index]) * 32, 4)

    async def all_free(self):
        async with asyncio.timeout(5):
            while self.held or any(p.load for p in self.membership.peers):
                await asyncio.sleep(0.01)


class CachingSite(Site):
    """Workers that cache the blocks of prompts and report them, under ``--routing kv``.

    A picture is a media key of its bytes and as many placeholders as its first byte says.
    """

    block_size = 4

    def __init__(self, path, pattern, max_local_prefill=0, **settings):
        super().__init__(path, pattern, "kv", KvRouting(KvSettings(**settings), max_local_prefill))
        self.kept = {}  # names of blocks, by worker
        self.cached = []  # tokens that were found, of each prompt in turn
        self.watches = []  # names of workers that were asked to report
        self.numbers = {}
        self.ears = {}

    async def answer(self, name, role, ask, reply):
        if isinstance(ask, WatchCache):
            await self.tell(name, reply)
        elif role == "E":
            await super().answer(name, role, ask, reply)
        else:
            metas = self.metas(ask)
            info = self.prefill(name, ask, metas)
            if "P" not in role and ask.cached_media is None:
                info = None
            await super().answer(name, role, ask, Telling(reply, info, metas))

    async def tell(self, name, reply):
        self.watches.append(name)
        self.ears.setdefault(name, []).append(reply)
        number = self.numbers.setdefault(name, 0)
        reply.send(CacheChange(number, tuple(self.kept.get(name, ())), snapshot=True))
        try:
            await reply.wait_until_closed()
        finally:
            self.ears[name].remove(reply)

    def change(self, name, held=(), gone=(), skip=0):
        """``skip``: changes that get lost before this one."""
        self.numbers[name] = self.numbers.get(name, 0) + 1 + skip
        for reply in self.ears.get(name, ()):
            reply.send(CacheChange(self.numbers[name], tuple(held), tuple(gone)))

    def metas(self, job):
        if job.cached_media is not None:
            return job.cached_media
        if job.handover is not None:
            return job.handover.media
        told = tuple(embedding.meta for embedding in job.embeddings)
        return told or tuple(self.meta(at, item) for at, item in enumerate(job.work.media))

    def prefill(self, name, job, metas):
        work, tokens, places, done = job.work, [], [], 0
        for item, meta in zip(work.media, metas, strict=True):
            tokens += work.prompt[done : item.at]
            places.append(MediaSpan(meta.key, len(tokens), meta.tokens))
            tokens += [work.prompt[item.at]] * meta.tokens
            done = item.at + 1
        tokens += work.prompt[done:]
        size = self.block_size
        standing = [
            [(p.key, p.start) for p in places if p.start < b + size and p.start + p.length > b]
            for b in range(0, len(tokens), size)
        ]
        names = list(blocks.hash_blocks(blocks.hash_salt(work.salt), tokens, size, standing))
        kept = self.kept.setdefault(name, {})
        found = next((i for i, one in enumerate(names) if one not in kept), len(names))
        if job.cached_media and size * found < places[-1].start + places[-1].length:
            raise PrefixGone("It is gone.")
        cached = size * min(found, (len(tokens) - 1) // size)
        if job.handover is None:
            self.cached.append(cached)
        kept.update(dict.fromkeys(names))
        self.change(name, names[found:])
        return PromptInfo(len(tokens), cached, media=tuple(places))

    def meta(self, index, item):
        data = bytes(item.data)
        return MediaMeta(data.ljust(32, b"-"), data[0] % 16 + 1)

    async def heard(self, blocks=None):
        """Until the frontend knows what the workers hold."""
        held = sum(len(kept) for kept in self.kept.values())
        async with asyncio.timeout(10):
            while self.kv.index.reported != (held if blocks is None else blocks):
                await asyncio.sleep(0.01)


class Telling:
    """A reply whose first delta has the prompt."""

    def __init__(self, reply, info, metas):
        self.reply, self.info, self.metas = reply, info, metas

    def send(self, answer):
        if isinstance(answer, Handover):
            delta = Delta(answer.delta.ids, answer.delta.finish, prompt=self.info)
            answer = Handover(delta, self.metas, answer.kv)
        elif self.info is not None:
            answer = Delta(answer.ids, answer.finish, prompt=self.info)
        self.info = None
        self.reply.send(answer)

    async def wait_until_closed(self):
        await self.reply.wait_until_closed()
