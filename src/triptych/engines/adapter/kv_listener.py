"""Listens to an engine's KV events, in the worker that drives it.

What was missed is asked for again, where the engine has an endpoint for that; what can't be had any
more, or can't be read, is told as KvCleared, for to know too little of a cache is safe, and to know
wrongly is not. Counts, and tells whoever listens.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Sequence
from typing import Any

import msgspec
import zmq
import zmq.asyncio

from triptych.engines.adapter import kv_events
from triptych.engines.adapter.kv_events import REPLAY_END, decode_kv_batch
from triptych.engines.base import OnKvEvents
from triptych.messages import KvCleared, KvEvent, KvRemoved, KvStored

log = logging.getLogger(__name__)
REPLAY_TIMEOUT = 5.0  # seconds that a replay may take to begin or go on


class KvListener:
    """``endpoint`` is where the engine publishes, ``replay`` where it is asked again (none: it is
    not); both are bound by the engine. Lives on the event loop that ``start`` is called on."""

    def __init__(self, endpoint: str, replay: str | None = None) -> None:
        self._endpoint = endpoint
        self._replay = replay
        self._receive: OnKvEvents = lambda events: None
        self._sequence = kv_events.BatchSequence()
        self._stored = 0
        self._removed = 0
        self._task: asyncio.Task[None] | None = None

    @property
    def counters(self) -> dict[str, float]:
        return {
            "kv_blocks_stored": self._stored,
            "kv_blocks_removed": self._removed,
            "kv_events_missed": self._sequence.missed,
        }

    def listen(self, receive: OnKvEvents) -> None:
        """Give ``receive`` what comes from now on, a batch at a time."""
        self._receive = receive

    def start(self) -> None:
        """Begin to listen; again and again does no harm."""
        if self._task is None:
            self._task = asyncio.get_running_loop().create_task(self._listen())
            self._task.add_done_callback(_log_end)

    def close(self) -> None:
        """Stop listening; the sockets are closed in the event loop's next turns."""
        if self._task is not None:
            self._task.cancel()

    async def _listen(self) -> None:
        context = zmq.asyncio.Context()
        try:
            heard = context.socket(zmq.SUB)
            heard.setsockopt(zmq.SUBSCRIBE, b"")
            heard.connect(self._endpoint)
            asked = None
            if self._replay is not None:
                asked = context.socket(zmq.DEALER)
                asked.connect(self._replay)
                await self._catch_up(asked)  # what was published before we listened
            while True:
                _, number, payload = await heard.recv_multipart()
                await self._take(int.from_bytes(number, "big"), payload, asked)
        finally:
            context.destroy(linger=0)
            self._tell([KvCleared()])  # from here on nothing is known

    async def _take(self, number: int, payload: bytes, asked: Any) -> None:
        place = self._sequence.place(number)
        if place == "gap" and asked is not None:
            await self._catch_up(asked)
            place = self._sequence.place(number)
        if place == "gap":
            self._sequence.skip_to(number)
            self._tell([KvCleared()])
            place = self._sequence.place(number)
        if place == "next":
            try:
                events = decode_kv_batch(payload)
            except msgspec.DecodeError as error:
                log.error("KV events can't be read: %s", error)
                self._sequence.missed += 1
                events = [KvCleared()]
            self._tell(events)

    async def _catch_up(self, asked: Any) -> None:
        """Take what the engine still has from the next batch on."""
        await asked.send_multipart([b"", self._sequence.next.to_bytes(8, "big")])
        async for number, payload in _answers(asked):
            await self._take(number, payload, None)

    def _tell(self, events: Sequence[KvEvent]) -> None:
        for event in events:
            if isinstance(event, KvStored):
                self._stored += len(event.blocks)
            elif isinstance(event, KvRemoved):
                self._removed += len(event.blocks)
        self._receive(events)


async def _answers(asked: Any) -> AsyncIterator[tuple[int, bytes]]:
    """Batches of one replay. One that stops halfway is left: the gap shows with the next batch."""
    while True:
        try:
            async with asyncio.timeout(REPLAY_TIMEOUT):
                _, _, number, payload = await asked.recv_multipart()
        except TimeoutError:
            log.warning("the engine did not give its KV events again within %s s", REPLAY_TIMEOUT)
            return
        place = int.from_bytes(number, "big", signed=True)
        if place == REPLAY_END:
            return
        yield place, payload


def _log_end(task: asyncio.Task[None]) -> None:
    """Its end takes nothing along: the events are no request's."""
    if not task.cancelled() and (error := task.exception()) is not None:
        log.error("KV events stopped: %r", error)
