import asyncio
import logging

from triptych.observe.log import RateLimitedLog, warning_totals

LOG = logging.getLogger("triptych.test")


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


def test_f28_a_flood_is_one_line_and_a_count(caplog):
    clock = Clock()
    limited = RateLimitedLog(LOG, "broken", "refused", seconds=10.0, clock=clock)
    for number in range(1000):
        limited.warning("broken", f"frame {number} is broken")
    limited.warning("refused", "a caller is refused")
    assert caplog.messages == ["frame 0 is broken", "a caller is refused"]
    clock.now = 10.0
    limited.warning("broken", "frame x is broken")
    assert caplog.messages[2:] == [
        "frame 999 is broken (999 similar lines suppressed)",
        "frame x is broken",
    ]
    assert limited.totals == {"broken": 1001, "refused": 1}


async def test_f28_the_count_is_logged_though_nothing_follows(caplog):
    limited = RateLimitedLog(LOG, "broken", seconds=0.01)
    for _ in range(3):
        limited.warning("broken", "a frame is broken")
    async with asyncio.timeout(20):
        while len(caplog.messages) < 2:
            await asyncio.sleep(0.005)
    assert caplog.messages[1] == "a frame is broken (2 similar lines suppressed)"
    limited.warning("broken", "again")
    assert caplog.messages[2] == "again"


def test_f28_all_of_a_process_are_counted_together():
    """Else ``/metrics`` would miss those of a RateLimitedLog that is private to its owner."""
    before = warning_totals()
    for _ in range(2):
        RateLimitedLog(LOG, "records_rejected", "unseen").warning("records_rejected", "forged")
    after = warning_totals()
    assert after["records_rejected"] - before.get("records_rejected", 0) == 2
    assert after["unseen"] == 0
