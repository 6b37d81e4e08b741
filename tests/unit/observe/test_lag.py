import asyncio
import time

from triptych.observe import lag
from triptych.observe.lag import Lag


async def test_work_that_holds_the_loop_up_is_seen_and_counted():
    watch = Lag()
    await asyncio.sleep(0.05)
    before = watch.stalls
    end = time.thread_time() + 2 * lag.STALL
    while time.thread_time() < end:
        pass
    await asyncio.sleep(0)
    await asyncio.sleep(2 * lag.EVERY)
    watch.stop()
    assert watch.stalls > before
    assert watch.work >= 2 * lag.STALL
    assert watch.late > lag.STALL


async def test_waiting_for_the_machine_is_not_work():
    watch = Lag()
    await asyncio.sleep(0.05)
    time.sleep(3 * lag.STALL)  # noqa: ASYNC251 (the loop stands still, as on a busy machine)
    await asyncio.sleep(2 * lag.EVERY)
    watch.stop()
    assert watch.late > lag.STALL
    assert watch.work < 3 * lag.STALL


async def test_the_worst_is_forgotten_after_a_while(monkeypatch):
    monkeypatch.setattr(lag, "LATELY", 0.0)
    watch = Lag()
    time.sleep(3 * lag.STALL)  # noqa: ASYNC251
    await asyncio.sleep(5 * lag.EVERY)  # two whiles and more
    watch.stop()
    assert watch.stalls >= 0
    assert watch.late < 3 * lag.STALL


async def test_a_stopped_watch_looks_no_more():
    watch = Lag()
    await asyncio.sleep(2 * lag.EVERY)
    watch.stop()
    seen = watch.stalls
    time.sleep(2 * lag.STALL)  # noqa: ASYNC251
    await asyncio.sleep(2 * lag.EVERY)
    assert watch.stalls == seen
