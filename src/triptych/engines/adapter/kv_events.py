"""The KV events of vLLM and SGLang, read from their ZeroMQ sockets and translated into ours.

Both engines send frames [topic, sequence number, batch]; a batch is msgpack: [time, [event, ...],
rank]. ``KvListener`` requests batches that it missed from the engine's replay endpoint, if there is
one. It reports KvCleared for batches that it can neither get nor decode: knowing too little about a
cache is safe, knowing something wrong is not.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Sequence
from typing import Any

import msgspec
from msgspec import Struct

from triptych.blocks import MediaInBlock
from triptych.engines.base import OnKvEvents
from triptych.messages import KvCleared, KvEvent, KvRemoved, KvStored

log = logging.getLogger(__name__)
REPLAY_END = -1  # the sequence number that ends a replay
REPLAY_TIMEOUT = 5.0  # seconds to wait for the next batch of a replay


class _Event(Struct, frozen=True, kw_only=True, tag=True):
    medium: str | None = None  # where the blocks are; None: in the engine's own memory
    group_idx: int | None = None  # of layers, where a model has several kinds of them


class BlockStored(_Event, frozen=True, kw_only=True):
    block_hashes: list[int | bytes]
    parent_block_hash: int | bytes | None
    token_ids: list[int]
    block_size: int
    lora_name: str | None = None
    extra_keys: list[list[Any] | None] | None = None  # vLLM: what each block's hash also contains
    cache_salt: str | None = None  # SGLang


class BlockRemoved(_Event, frozen=True, kw_only=True):
    block_hashes: list[int | bytes]


class AllBlocksCleared(_Event, frozen=True, kw_only=True):
    pass


class _Batch(Struct, frozen=True, array_like=True):
    time: float
    events: list[BlockStored | BlockRemoved | AllBlocksCleared]
    rank: int | None = None


_BATCH = msgspec.msgpack.Decoder(_Batch)


def decode_kv_batch(payload: bytes) -> list[KvEvent]:
    """The events of one batch that concern the engine's own memory; raises DecodeError.

    In a model with several kinds of layers, the events of the first kind stand for all.
    """
    return [
        _translate(event)
        for event in _BATCH.decode(payload).events
        if event.medium in (None, "GPU") and not event.group_idx
    ]


class BatchSequence:
    """Checks that batches arrive in order and without gaps."""

    def __init__(self) -> None:
        self.next = 0
        self.missed = 0  # batches that could not be replayed

    def place(self, number: int) -> str:
        """``old``: received before; ``next``: accepted now; ``gap``: an earlier one is missing."""
        if number < self.next:
            return "old"
        if number > self.next:
            return "gap"
        self.next += 1
        return "next"

    def skip_to(self, number: int) -> None:
        """Give up on the batches before this one."""
        self.missed += number - self.next
        self.next = number


def _translate(event: BlockStored | BlockRemoved | AllBlocksCleared) -> KvEvent:
    if isinstance(event, BlockRemoved):
        return KvRemoved(tuple(_block_id(block) for block in event.block_hashes))
    if isinstance(event, AllBlocksCleared):
        return KvCleared()
    parent = event.parent_block_hash
    media, salt = _media_and_salt(event)
    return KvStored(
        blocks=tuple(_block_id(block) for block in event.block_hashes),
        parent=None if parent is None else _block_id(parent),
        tokens=tuple(event.token_ids),
        block_size=event.block_size,
        media=media,
        salt=salt,
    )


def _block_id(block: int | bytes) -> int:
    """64 bits of a block's hash, which comes in two forms; vLLM shortens the bytes the same way."""
    return block if isinstance(block, int) else int.from_bytes(block[-8:], "big")


def _media_and_salt(event: BlockStored) -> tuple[tuple[tuple[MediaInBlock, ...], ...], str]:
    """The media items in each of these blocks, and the salt, from the extra keys of their hashes.

    A pair is an item; a string other than the LoRA adapter's name is the salt. The engine counts an
    item's start from its block, we count from the first token of all these blocks.
    """
    media: list[tuple[MediaInBlock, ...]] = []
    salt = event.cache_salt or ""
    for index, keys in enumerate(event.extra_keys or ()):
        items: dict[MediaInBlock, None] = {}  # ordered; a video and its sound are one item of ours
        for key in keys or ():
            if isinstance(key, str):
                salt = salt if key == event.lora_name else key
            elif isinstance(key, list) and list(map(type, key)) == [str, int]:
                items[_media_key(key[0]), index * event.block_size + key[1]] = None
        media.append(tuple(items))
    if not any(media):
        return (), salt
    return (*media, *[()] * (len(event.block_hashes) - len(media))), salt


def _media_key(identifier: str) -> bytes:
    """Adapters send our key in hexadecimal; a tenant's mark or the name of a part may follow behind
    a colon. An identifier of another origin stays as it is."""
    try:
        return bytes.fromhex(identifier.partition(":")[0])
    except ValueError:
        return identifier.encode()


class KvListener:
    """Receives an engine's KV events in the worker that drives it, on the event loop of ``start``.

    The engine binds both addresses: it publishes at ``endpoint`` and replays at ``replay``.
    """

    def __init__(self, endpoint: str, replay: str | None = None) -> None:
        self._endpoint = endpoint
        self._replay = replay
        self._on_events: OnKvEvents = lambda events: None
        self._sequence = BatchSequence()
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

    def listen(self, on_events: OnKvEvents) -> None:
        """Call ``on_events`` with each batch from now on."""
        self._on_events = on_events

    def start(self) -> None:
        """Begin to listen; later calls do nothing."""
        if self._task is None:
            self._task = asyncio.get_running_loop().create_task(self._listen())
            self._task.add_done_callback(_log_failure)

    def close(self) -> None:
        """Stop listening; the event loop closes the sockets in its next turns."""
        if self._task is not None:
            self._task.cancel()

    async def _listen(self) -> None:
        import zmq
        import zmq.asyncio

        context = zmq.asyncio.Context()
        try:
            events = context.socket(zmq.SUB)
            events.setsockopt(zmq.SUBSCRIBE, b"")
            events.connect(self._endpoint)
            replay = None
            if self._replay is not None:
                replay = context.socket(zmq.DEALER)
                replay.connect(self._replay)
                await self._catch_up(replay)  # what the engine published before we connected
            while True:
                _, number, payload = await events.recv_multipart()
                await self._accept(int.from_bytes(number, "big"), payload, replay)
        finally:
            context.destroy(linger=0)
            self._report([KvCleared()])  # nothing is known from here on

    async def _accept(self, number: int, payload: bytes, replay: Any) -> None:
        place = self._sequence.place(number)
        if place == "gap" and replay is not None:
            await self._catch_up(replay)
            place = self._sequence.place(number)
        if place == "gap":
            self._sequence.skip_to(number)
            self._report([KvCleared()])
            place = self._sequence.place(number)
        if place == "next":
            try:
                events = decode_kv_batch(payload)
            except msgspec.DecodeError as error:
                log.error("cannot decode KV events: %s", error)
                self._sequence.missed += 1
                events = [KvCleared()]
            self._report(events)

    async def _catch_up(self, replay: Any) -> None:
        """Request all batches that the engine still has, from the next one on."""
        await replay.send_multipart([b"", self._sequence.next.to_bytes(8, "big")])
        async for number, payload in _replayed(replay):
            await self._accept(number, payload, None)

    def _report(self, events: Sequence[KvEvent]) -> None:
        for event in events:
            if isinstance(event, KvStored):
                self._stored += len(event.blocks)
            elif isinstance(event, KvRemoved):
                self._removed += len(event.blocks)
        self._on_events(events)


async def _replayed(replay: Any) -> AsyncIterator[tuple[int, bytes]]:
    """The batches of one replay. If it stops halfway, the next batch shows the gap."""
    while True:
        try:
            async with asyncio.timeout(REPLAY_TIMEOUT):
                _, _, number, payload = await replay.recv_multipart()
        except TimeoutError:
            log.warning("the engine did not replay its KV events within %s s", REPLAY_TIMEOUT)
            return
        place = int.from_bytes(number, "big", signed=True)
        if place == REPLAY_END:
            return
        yield place, payload


def _log_failure(task: asyncio.Task[None]) -> None:
    """No request depends on KV events, so their end ends nothing else."""
    if not task.cancelled() and (error := task.exception()) is not None:
        log.error("the KV event listener failed: %r", error)
