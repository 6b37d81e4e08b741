"""What vLLM and SGLang publish of their prefix caches, as our own events.

Both send frames [topic, sequence, batch], the batch in msgpack: [time, [event, ...], rank]. What is
here knows no socket (``kv_listener`` does): it reads a batch, and notices what was missed.
"""

from __future__ import annotations

from typing import Any

import msgspec
from msgspec import Struct

from triptych.blocks import MediaInBlock
from triptych.messages import KvCleared, KvEvent, KvRemoved, KvStored

REPLAY_END = -1  # the sequence number that ends a replay


class _Event(Struct, frozen=True, kw_only=True, tag=True):
    medium: str | None = None  # where the blocks lie; none: with the engine
    group_idx: int | None = None  # of layers, where a model has several kinds of them


class BlockStored(_Event, frozen=True, kw_only=True):
    block_hashes: list[int | bytes]
    parent_block_hash: int | bytes | None
    token_ids: list[int]
    block_size: int
    lora_name: str | None = None
    extra_keys: list[list[Any] | None] | None = None  # vLLM: of each block, besides its tokens
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
    """The events of one batch that are about the engine's own memory; raises DecodeError.

    Of a model with several kinds of layers, the first kind stands for all.
    """
    return [
        _ours(event)
        for event in _BATCH.decode(payload).events
        if event.medium in (None, "GPU") and not event.group_idx
    ]


class BatchSequence:
    """Whether batches come one after the other."""

    def __init__(self) -> None:
        self.next = 0
        self.missed = 0  # batches that nobody could give again

    def place(self, number: int) -> str:
        """``old``: had before; ``next``: taken now; ``gap``: one before it is missing."""
        if number < self.next:
            return "old"
        if number > self.next:
            return "gap"
        self.next += 1
        return "next"

    def skip_to(self, number: int) -> None:
        """Go on from here: what lies between can't be had any more."""
        self.missed += number - self.next
        self.next = number


def _ours(event: BlockStored | BlockRemoved | AllBlocksCleared) -> KvEvent:
    if isinstance(event, BlockRemoved):
        return KvRemoved(tuple(_name(block) for block in event.block_hashes))
    if isinstance(event, AllBlocksCleared):
        return KvCleared()
    parent = event.parent_block_hash
    media, salt = _extra(event)
    return KvStored(
        blocks=tuple(_name(block) for block in event.block_hashes),
        parent=None if parent is None else _name(parent),
        tokens=tuple(event.token_ids),
        block_size=event.block_size,
        media=media,
        salt=salt,
    )


def _name(block: int | bytes) -> int:
    """One of both forms that a block's hash has on the wire; vLLM shortens it to 64 bits so too."""
    return block if isinstance(block, int) else int.from_bytes(block[-8:], "big")


def _extra(event: BlockStored) -> tuple[tuple[tuple[MediaInBlock, ...], ...], str]:
    """The media items in each of these blocks, and the salt: whatever is a pair, and whatever is a
    string but for the adapter's name. Starts count from the block there, from the first of all
    tokens with us."""
    media: list[tuple[MediaInBlock, ...]] = []
    salt = event.cache_salt or ""
    for index, keys in enumerate(event.extra_keys or ()):
        items: dict[MediaInBlock, None] = {}  # in order; a clip and its sound are one item with us
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
    """Ours is sent to engines in hexadecimal, and may go on behind a colon: a tenant's mark, a part
    of the item. Another's is kept as it is."""
    try:
        return bytes.fromhex(identifier.partition(":")[0])
    except ValueError:
        return identifier.encode()
