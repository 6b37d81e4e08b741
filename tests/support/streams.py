"""Many streams at once against one server, and what each of them got, token for token."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from support.rows import SECRETS
from support.servers import TestServer, image_part, text_part


@dataclass
class Stream:
    """One stream to its end: whole, or with the error that ended it."""

    ids: list[int] = field(default_factory=list)
    error: str = ""
    done: bool = False
    gap: float = 0.0  # seconds, the longest between two tokens
    last: float = 0.0  # when there was one

    def take(self, ids: Sequence[int]) -> None:
        now = time.monotonic()
        if self.ids:
            self.gap = max(self.gap, now - self.last)
        self.last = now
        self.ids += ids

    def fail(self, answer: dict[str, Any]) -> None:
        """It ends in an error, which must contain no address or path."""
        assert not SECRETS.search(json.dumps(answer)), answer
        self.error = answer["error"]["code"]


def body(
    server: TestServer, i: int, tokens: int, picture: bytes = b"", **fields: Any
) -> dict[str, Any]:
    """A seeded, sampled request with a picture of its own."""
    content = [image_part(picture or b"picture %d" % i), text_part(f"Number {i}?")]
    return {
        "model": server.model,
        "messages": [{"role": "user", "content": content}],
        "seed": i,
        "temperature": 1.0,
        "max_tokens": tokens,
        "ignore_eos": True,
        "stream": True,
        "return_token_ids": True,
    } | fields


async def follow(
    session: aiohttp.ClientSession, asked: dict[str, Any], begun: Callable[[], None]
) -> Stream:
    stream = Stream()
    async with session.post("/v1/chat/completions", json=asked) as got:
        if got.status != 200:
            stream.fail(await got.json())
            begun()
            return stream
        async for line in got.content:
            if line.startswith(b"data: [DONE]"):
                stream.done = True
            elif line.startswith(b"data: "):
                _take(stream, json.loads(line[6:]), begun)
    return stream


def _take(stream: Stream, event: dict[str, Any], begun: Callable[[], None]) -> None:
    if "error" in event:
        stream.fail(event)
    for choice in event.get("choices", ()):
        ids = choice.get("token_ids") or []
        if ids and not stream.ids:
            begun()
        if ids:
            stream.take(ids)


@asynccontextmanager
async def clients(server: TestServer, seconds: float) -> AsyncIterator[aiohttp.ClientSession]:
    connector = aiohttp.TCPConnector(limit=0, force_close=True)
    async with (
        asyncio.timeout(seconds),  # a stream that hangs fails the test
        aiohttp.ClientSession(
            server.url,
            connector=connector,
            headers={"Authorization": f"Bearer {server.key}"},
            timeout=aiohttp.ClientTimeout(total=None),
        ) as session,
    ):
        yield session


async def all_at_once(
    server: TestServer,
    bodies: Sequence[dict[str, Any]],
    amid: Callable[[], object] = lambda: None,
    *,
    begun: bool = True,
    seconds: float = 120,
) -> list[Stream]:
    """The streams of all bodies; ``amid`` runs in a thread once all of them have begun to stream,
    or (not ``begun``) as soon as they are sent."""
    started = asyncio.Semaphore(0)
    async with clients(server, seconds) as session, asyncio.TaskGroup() as group:
        tasks = [group.create_task(follow(session, asked, started.release)) for asked in bodies]
        for _ in tasks if begun else ():
            await started.acquire()
        await asyncio.to_thread(amid)
    return [task.result() for task in tasks]


async def on_and_on(
    server: TestServer,
    bodies: Sequence[dict[str, Any]],
    amid: Callable[[], object],
    seconds: float = 120,
) -> list[list[Stream]]:
    """Each body is asked again and again until ``amid`` is done; all streams of each."""
    stop = asyncio.Event()

    async def ask(asked: dict[str, Any]) -> list[Stream]:
        streams: list[Stream] = []
        while not stop.is_set():
            streams.append(await follow(session, asked, lambda: None))
        return streams

    async with clients(server, seconds) as session, asyncio.TaskGroup() as group:
        tasks = [group.create_task(ask(asked)) for asked in bodies]
        try:
            await asyncio.to_thread(amid)
        finally:
            stop.set()
    return [task.result() for task in tasks]


def streamed(server: TestServer, bodies: Sequence[dict[str, Any]], *amid: Any, **how: Any) -> Any:
    return asyncio.run(all_at_once(server, bodies, *amid, **how))


def equal(streams: Sequence[Stream], wanted: Sequence[Sequence[int]]) -> None:
    """All came to their end, with the wanted tokens."""
    broken = [(i, s.error, len(s.ids)) for i, s in enumerate(streams) if not s.done or s.error]
    assert not broken, f"streams that broke (number, error, tokens): {broken}"
    other = [i for i, s in enumerate(streams) if list(s.ids) != list(wanted[i])]
    assert not other, f"streams with other tokens: {other}"


def whole(streams: Sequence[Stream], tokens: int) -> list[list[int]]:
    """Their ids, once it is sure that all of them came to their end."""
    assert {len(s.ids) for s in streams} == {tokens}
    equal(streams, [s.ids for s in streams])
    return [s.ids for s in streams]
