import asyncio
import time

from triptych.observe import event_loop_lag
from triptych.observe.event_loop_lag import EventLoopLag


async def test_work_that_blocks_the_loop_counts_as_a_stall():
    watch = EventLoopLag()
    await asyncio.sleep(0.05)
    before = watch.stalls
    end = time.thread_time() + 2 * event_loop_lag.STALL_SECONDS
    while time.thread_time() < end:
        pass
    await asyncio.sleep(0)
    await asyncio.sleep(2 * event_loop_lag.INTERVAL)
    watch.stop()
    assert watch.stalls > before
    assert watch.max_cpu >= 2 * event_loop_lag.STALL_SECONDS
    assert watch.max_lag > event_loop_lag.STALL_SECONDS


async def test_waiting_for_the_machine_is_not_cpu_time():
    watch = EventLoopLag()
    await asyncio.sleep(0.05)
    time.sleep(3 * event_loop_lag.STALL_SECONDS)  # noqa: ASYNC251 (the loop stands still, as on a busy machine)
    await asyncio.sleep(2 * event_loop_lag.INTERVAL)
    watch.stop()
    assert watch.max_lag > event_loop_lag.STALL_SECONDS
    assert watch.max_cpu < 3 * event_loop_lag.STALL_SECONDS


async def test_the_worst_values_expire(monkeypatch):
    monkeypatch.setattr(event_loop_lag, "PERIOD", 0.0)
    watch = EventLoopLag()
    time.sleep(3 * event_loop_lag.STALL_SECONDS)  # noqa: ASYNC251
    await asyncio.sleep(5 * event_loop_lag.INTERVAL)  # two periods and more
    watch.stop()
    assert watch.stalls >= 0
    assert watch.max_lag < 3 * event_loop_lag.STALL_SECONDS


async def test_nothing_is_measured_after_stop():
    watch = EventLoopLag()
    await asyncio.sleep(2 * event_loop_lag.INTERVAL)
    watch.stop()
    seen = watch.stalls
    time.sleep(2 * event_loop_lag.STALL_SECONDS)  # noqa: ASYNC251
    await asyncio.sleep(2 * event_loop_lag.INTERVAL)
    assert watch.stalls == seen
