"""How long ``ask`` waits for a server that it started, and what it shows meanwhile."""

import tempfile

import pytest

from triptych.commands import temporary_server
from triptych.errors import ServiceError

STEP = 5.0  # seconds between two looks


class Clock:
    now = 0.0

    def monotonic(self):
        return self.now

    def sleep(self, seconds):
        self.now += STEP


class Process:
    """A server that ends, is ready, or says that it is not, by the clock."""

    def __init__(self, clock, ready, ends):
        self._clock, self._ready, self._ends = clock, ready, ends

    def poll(self):
        return 1 if self._clock.now >= self._ends else None

    def ready(self):
        if self._clock.now < self._ready / 2:
            return False
        if self._clock.now < self._ready:
            raise ServiceError("not ready: unready")
        return True


@pytest.fixture
def waited(monkeypatch):
    def wait(ready, ends):
        clock, told = Clock(), []
        monkeypatch.setattr(temporary_server, "time", clock)
        process = Process(clock, ready, ends)
        with tempfile.TemporaryFile("w+") as log:
            print("[E-0] importing ...\n[E-0] loading encoder ... 40%\n", file=log, flush=True)
            return temporary_server._ready(process, process, log, told.append), told

    return wait


def test_a_large_model_may_take_its_time_and_says_so_ever_less_often(waited):
    done, told = waited(ready=3600, ends=float("inf"))
    assert done
    assert told[0] == "starting  5 s  [E-0] loading encoder ... 40%"  # what it waits for
    assert told[-1] == "ready     after 3600.0 s"
    assert 10 < len(told) < 50


def test_a_server_that_ends_is_not_waited_for(waited):
    done, told = waited(ready=float("inf"), ends=30)
    assert not done
    assert told[-1].startswith("starting")


def test_the_progress_line_is_that_of_a_process_and_not_the_banners():
    with tempfile.TemporaryFile("w+") as log:
        log.write("  curl http://127.0.0.1:1/v1 \\\n    -d '{}'\n")
        log.flush()
        assert temporary_server.last_line(log) == ""
        log.write("[E-0] loading weights ... 40%\n  a line of the supervisor\n")
        log.flush()
        assert temporary_server.last_line(log) == "[E-0] loading weights ... 40%"
