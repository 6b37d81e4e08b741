"""What is made of batches as they come; with sockets see ``test_kv_events``."""

import msgspec
import pytest

from triptych.engines.adapter.kv_events import KvListener
from triptych.messages import KvCleared, KvEvent, KvRemoved


def batch(*blocks: int) -> bytes:
    return msgspec.msgpack.encode([0.0, [{"type": "BlockRemoved", "block_hashes": blocks}], None])


@pytest.mark.asyncio
async def test_an_unreadable_batch_is_skipped_and_the_next_one_read():
    told: list[KvEvent] = []
    listener = KvListener("ipc://nowhere")
    listener.listen(told.extend)
    for number, payload in enumerate([batch(1), b"\x90", batch(2)]):
        await listener._accept(number, payload, None)
    assert told == [KvRemoved((1,)), KvCleared(), KvRemoved((2,))]
    assert listener.counters["kv_events_missed"] == 1
    assert listener.counters["kv_blocks_removed"] == 2
