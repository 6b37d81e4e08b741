"""An engine that dies takes its worker with it and nothing else, and a new one serves."""

from __future__ import annotations

import asyncio
import os
import signal

import pytest

from contract.engines.kinds import engine_processes
from contract.engines.panels import SECONDS, Listener, Panels
from triptych.engines.base import Generation
from triptych.errors import WorkerLost

pytestmark = pytest.mark.asyncio(loop_scope="session")


async def test_a_dead_engine_is_reported_and_a_fresh_one_serves(panels: Panels):
    panels.needs("own process")
    panel = await panels.get("EPD")
    assert panel.loaded.died is not None
    assert panels.traits.process, "name its process in kinds.TRAITS"
    expected = await panel.answer(panels.work(panels.prompt(1)))
    [engine, *_] = engine_processes(panels.name)
    listeners = [Listener() for _ in range(3)]
    calls = []
    for number, listener in enumerate(listeners):
        work = panels.work(panels.prompt(number), max_tokens=900)
        generation = Generation(work, "PD", ())
        calls.append(asyncio.ensure_future(panel.engine.generate(generation, listener)))
    await asyncio.gather(*[listener.begun.wait() for listener in listeners])
    os.kill(engine, signal.SIGKILL)
    async with asyncio.timeout(SECONDS):
        results = await asyncio.gather(*calls, return_exceptions=True)
        await panel.loaded.died.wait()
    assert [type(result) for result in results] == [WorkerLost] * 3
    with pytest.raises(WorkerLost):
        await panel.answer(panels.work(panels.prompt(1)))
    panel.loaded.report()  # a worker may be asked until it has ended

    fresh = await panels.get("EPD")
    assert fresh is not panel
    assert (await fresh.answer(panels.work(panels.prompt(1)))).ids == expected.ids
    assert engine not in engine_processes(panels.name)
