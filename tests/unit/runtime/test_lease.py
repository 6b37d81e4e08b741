"""Who lives, as one reader sees it: by his own clock, and only while he is in touch."""

import pytest

from triptych.messages import WorkerRecord
from triptych.runtime.lease import FORGET_SECONDS, DiscoveryEntry, LivenessView

LEASE = 5.0


class Clock:
    def __init__(self):
        self.now = 1000.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def seen(clock):
    seen = LivenessView(LEASE, clock)
    seen.touch()
    return seen


def entry(worker="P-0", epoch=1, **fields):
    return DiscoveryEntry(epoch, WorkerRecord(worker, "P", epoch, "a:1", 1, "m", **fields))


def in_touch(seen, clock, seconds):
    """Time passes without news from discovery."""
    end = clock.now + seconds
    while clock.now < end:
        clock.now += 0.5
        seen.touch()


def test_a_lease_ends_without_news(seen, clock):
    """Proved by taking any entry for news."""
    assert seen.update("P-0", entry(), 1)
    for _ in range(9):
        in_touch(seen, clock, 0.5)
        assert not seen.update("P-0", entry(), 1)  # the same again, as a new view shows it
        assert set(seen.view()) == {"P-0"}
    in_touch(seen, clock, 1)
    assert seen.view() == {}


def test_a_renewed_lease_continues_unchanged(seen, clock):
    seen.update("P-0", entry(), 1)
    for revision in range(2, 20):
        in_touch(seen, clock, 2)
        assert not seen.update("P-0", entry(), revision)
        assert seen.view() == {"P-0": entry().record}
    assert seen.update("P-0", entry(state="draining"), 20)


def test_revisions_begin_again_when_the_bucket_was_lost(seen, clock):
    seen.update("P-0", entry(), 500)
    in_touch(seen, clock, 4)
    seen.update("P-0", entry(), 1)
    in_touch(seen, clock, 4)
    assert set(seen.view()) == {"P-0"}


def test_out_of_touch_no_time_passes_and_a_lease_follows(seen, clock):
    """Proved by counting from the clock instead of the last touch, and by sparing none after."""
    seen.update("P-0", entry(), 1)
    in_touch(seen, clock, 4)
    clock.now += 60
    assert set(seen.view()) == {"P-0"}
    assert seen.silent(3)
    seen.touch()
    assert not seen.silent(3)
    in_touch(seen, clock, 4)
    assert set(seen.view()) == {"P-0"}
    in_touch(seen, clock, 2)
    assert seen.view() == {}


def test_a_view_never_goes_back_to_an_older_epoch(seen):
    seen.update("P-0", entry(epoch=9), 1)
    assert not seen.update("P-0", entry(epoch=8), 2)
    assert seen.view()["P-0"].epoch == 9
    assert seen.update("P-0", DiscoveryEntry(10), 3)  # claimed, and not there yet
    assert seen.view() == {}
    assert not seen.update("P-0", entry(epoch=9), 4)
    assert seen.view() == {}


def test_a_removed_worker_is_gone_and_may_register_again(seen):
    assert not seen.remove("P-0")
    seen.update("P-0", entry(epoch=9), 1)
    assert seen.remove("P-0")
    assert seen.view() == {}
    assert not seen.update("P-0", entry(epoch=8), 2)
    assert seen.update("P-0", entry(epoch=9), 3)
    assert set(seen.view()) == {"P-0"}


def test_epochs_are_forgotten_in_the_end(seen, clock):
    """A host whose clock was set back must not wait for an hour until its workers are seen."""
    seen.update("P-0", entry(epoch=9), 1)
    in_touch(seen, clock, FORGET_SECONDS - 1)
    assert not seen.update("P-0", entry(epoch=3), 2)
    in_touch(seen, clock, 2)
    assert seen.update("P-0", entry(epoch=3), 3)
    assert seen.view()["P-0"].epoch == 3
