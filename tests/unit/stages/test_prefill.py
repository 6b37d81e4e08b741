"""Prefill's hand-over: an engine that is done, one that goes on, and one that fails."""

from __future__ import annotations

import asyncio
import contextlib
import gc

import pytest

from triptych.engines.base import Generation, Media, PrefillOutput
from triptych.errors import EngineFailed, TicketLost
from triptych.messages import Delta, Handover, MediaMeta, PromptInfo, Sampling, Work
from triptych.stages.generate import StageInputs, run_prefill
from triptych.stages.health import EngineHealth, MonitoredEngine
from triptych.transfer.client import TransferClient

WORK = Work("w", (1, 2), (), Sampling(seed=1))
FIRST = Delta((7,), prompt=PromptInfo(2, 0))


class Reply:
    def __init__(self) -> None:
        self.sent = []
        self.held = asyncio.Event()

    def send(self, answer) -> None:
        self.sent.append(answer)

    async def wait_until_closed(self) -> None:
        self.held.set()
        await asyncio.get_running_loop().create_future()


class Engine:
    """``after``: what it does once it has emitted."""

    def __init__(self, transfers, after, *, kv=True) -> None:
        self._transfers = transfers
        self._kv = kv
        self._after = after
        self.cancelled = False

    async def generate(self, generation, emit) -> None:
        emit(PrefillOutput(FIRST, (self._transfers.empty("uint8", (4,)),) if self._kv else ()))
        try:
            await self._after()
        except asyncio.CancelledError:
            self.cancelled = True
            raise


@pytest.fixture
async def transfers():
    transfers = TransferClient("shm", "P-0", 1)
    gc.disable()  # what a cycle holds is held until a collection, which may be far
    yield transfers
    await asyncio.sleep(0)  # callbacks of the task have run
    counts = transfers.counts()
    gc.enable()
    assert counts.tickets == counts.segments == 0
    await transfers.close()


def start(transfers, after, **how):
    engine, reply = Engine(transfers, after, **how), Reply()
    fetched = Media(MediaMeta(b"k" * 32, 1), (transfers.empty("uint8", (4,)),))  # counted too
    media = (fetched,) if after is done else ()
    inputs = StageInputs(Generation(WORK, "P", media), {"transfer": 1.0})
    return engine, reply, asyncio.create_task(run_prefill(inputs, engine, transfers, reply))


async def done():
    pass


async def forever():
    await asyncio.get_running_loop().create_future()


@pytest.mark.parametrize("after", [done, forever])
async def test_the_ticket_lives_as_long_as_the_call(transfers, after):
    engine, reply, task = start(transfers, after)
    await reply.held.wait()
    [answer] = reply.sent
    assert isinstance(answer, Handover)
    assert answer.delta.ids == (7,)
    assert answer.delta.timings == {"transfer": 1.0}
    assert transfers.counts().tickets == 1
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert engine.cancelled is (after is forever)


async def test_it_hands_over_by_what_its_reader_can_take():
    transfers = TransferClient("auto", "P-0", 1)
    for by, transport in (("inline", "inline"), ("", "shm")):
        inputs, reply = StageInputs(Generation(WORK, "P", ()), {}), Reply()
        engine = Engine(transfers, done)
        task = asyncio.create_task(run_prefill(inputs, engine, transfers, reply, by))
        await reply.held.wait()
        assert reply.sent[0].kv.transport == transport
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
    await transfers.close()


async def test_a_failure_after_the_hand_over_ends_the_call(transfers):
    """Decode waits for a KV cache that never comes: the pipeline must get an error."""
    failing = asyncio.Event()

    async def fail():
        await failing.wait()
        raise EngineFailed("gone")

    _, reply, task = start(transfers, fail)
    await reply.held.wait()
    failing.set()
    with pytest.raises(EngineFailed, match="gone"):
        await task


async def test_a_first_token_that_is_the_last_needs_no_ticket(transfers):
    _, reply, task = start(transfers, done, kv=False)
    await task
    [answer] = reply.sent
    assert answer.kv is None


async def test_a_cancel_while_the_engine_is_busy_reaches_it(transfers):
    class Busy(Engine):
        async def generate(self, generation, emit) -> None:
            with contextlib.suppress(TimeoutError):
                await forever()

    engine, reply = Busy(transfers, done), Reply()
    inputs = StageInputs(Generation(WORK, "P", ()), {})
    task = asyncio.create_task(run_prefill(inputs, engine, transfers, reply))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert reply.sent == []


async def test_memory_made_from_a_lost_ticket_is_released(transfers):
    """Off: inputs.run holds the frames in which it got the loss. They lead to those of the emitter,
    which hold what was made, and the task, which holds the error."""

    class Lost:
        def check(self):
            raise TicketLost("gone")

    inputs = StageInputs(Generation(WORK, "P", ()), {}, [Lost()])
    engine = MonitoredEngine(Engine(transfers, done), EngineHealth())
    with contextlib.suppress(TicketLost):
        await run_prefill(inputs, engine, transfers, Reply())


async def test_an_engine_that_says_nothing_is_an_error(transfers):
    class Silent(Engine):
        async def generate(self, generation, emit) -> None:
            await asyncio.sleep(0)

    inputs = StageInputs(Generation(WORK, "P", ()), {})
    with pytest.raises(EngineFailed, match="without a result"):
        await run_prefill(inputs, Silent(transfers, done), transfers, Reply())
