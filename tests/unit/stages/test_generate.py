from __future__ import annotations

import asyncio
import contextlib
import gc
import weakref

import pytest

from triptych.engines.base import Generation
from triptych.errors import TicketLost
from triptych.messages import Delta, Sampling, Work
from triptych.stages.generate import StageInputs, run_engine

WORK = Work("w", (1,), (), Sampling(seed=1))


class Borrowed:
    arrays = ()

    def __init__(self, sound: bool) -> None:
        self.sound = sound

    def check(self) -> None:
        if not self.sound:
            raise TicketLost("gone")

    def close(self) -> None: ...


class Steps:
    """Emits from outside the call, as a step loop does, or from inside it."""

    def __init__(self, *, inside: bool) -> None:
        self.inside = inside
        self.cancelled = False

    async def generate(self, generation, emit) -> None:
        deltas = [Delta((1,)), Delta((2,), "stop")]
        if self.inside:
            for delta in deltas:
                emit(delta)
            return
        done = asyncio.get_running_loop().create_future()
        for delta in deltas:
            asyncio.get_running_loop().call_soon(emit, delta)
        asyncio.get_running_loop().call_later(0.01, done.set_result, None)
        try:
            await asyncio.shield(done)
        except asyncio.CancelledError:
            self.cancelled = True
            raise


@pytest.mark.parametrize("inside", [True, False])
async def test_a_result_from_memory_read_in_time_is_sent(inside):
    sent = []
    inputs = StageInputs(Generation(WORK, "PD", ()), {}, [Borrowed(True)])
    await run_engine(inputs, Steps(inside=inside), sent.append)
    assert [delta.ids for delta in sent] == [(1,), (2,)]


@pytest.mark.parametrize("inside", [True, False])
async def test_a_result_from_memory_read_too_late_is_lost_and_cancels_the_engine(inside):
    sent = []
    inputs = StageInputs(Generation(WORK, "PD", ()), {}, [Borrowed(True), Borrowed(False)])
    engine = Steps(inside=inside)
    with pytest.raises(TicketLost):
        await run_engine(inputs, engine, sent.append)
    assert sent == []
    assert engine.cancelled is not inside
    await asyncio.sleep(0)  # no cancellation is left over
    assert not asyncio.current_task().cancelling()


async def test_a_ticket_that_is_lost_leaves_no_cycle():
    """Off: run keeps the error that it raises."""
    inputs = StageInputs(Generation(WORK, "PD", ()), {}, [Borrowed(False)])
    watched = weakref.ref(inputs.borrowed[0])
    gc.disable()
    try:
        with contextlib.suppress(TicketLost):
            await run_engine(inputs, Steps(inside=True), print)
        del inputs
        await asyncio.sleep(0)  # the step in which it was cancelled holds that
        assert watched() is None
    finally:
        gc.enable()


async def test_a_caller_that_is_cancelled_stays_cancelled():
    inputs = StageInputs(Generation(WORK, "PD", ()), {}, [Borrowed(False)])
    call = asyncio.ensure_future(run_engine(inputs, Steps(inside=False), lambda _: None))
    await asyncio.sleep(0)
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
