"""What the list of faults promises of every fault: who lives, what is held, and how soon.

Times are promised for a quiet machine. Tests hold them to ``SLACK`` times that, so that they fail
where a guard is lost and not where cores are busy; what was measured is printed (``pytest -rP``).
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import psutil

from support import pictures
from support.rows import GROWTH, SECRETS
from support.servers import TestServer, image_part, text_part

SLACK = 3
LONG = bool(os.environ.get("TRIPTYCH_LONG_FAULTS"))  # faults last as long as the list says
GOOD = [image_part(pictures.encoded(pictures.draw(1, 84, 56))), text_part("Well?")]


def within(promised: float, took: float, what: str) -> None:
    """Hold the seconds that something took to those that were promised."""
    measured = f"{what}: {took:.2f} s (promised: {promised:g} s)"
    print(measured)
    assert took <= SLACK * promised, measured


def soon(
    server: TestServer,
    condition: Callable[[], bool],
    promised: float,
    what: str,
    since: float | None = None,
) -> None:
    """Wait until it holds, for no longer than was promised. ``since``: when the time began."""
    since = time.monotonic() if since is None else since
    while not condition():
        late = time.monotonic() - since > SLACK * promised
        assert not late, f"not within {SLACK} times {promised:g} s: {what}\n{server.tail()}"
        time.sleep(0.02)
    within(promised, time.monotonic() - since, what)


def at_rest(server: TestServer) -> bool:
    """Every worker is there; every block, ticket and segment is back."""
    return server.complete() and all(
        w["kv_blocks_free"] == w["kv_blocks_total"]
        and not w["tickets"] + w["segments"] + w["running"] + w["queued"]
        for w in server.cluster().values()
    )


@contextmanager
def unharmed(server: TestServer, *struck: str) -> Iterator[None]:
    """A fault happens within; afterwards all is as it was. ``struck``: whom the fault replaces.

    The same processes live and hold nothing, the next good request gives 200 without an address,
    and no process, new ones included, has grown by more than 50 MB. ``streams`` checks the texts of
    errors.
    """
    server.wait(lambda: at_rest(server), what="at rest before the fault")
    before = server.pids()
    memory = {name: resident(pid) for name, pid in before.items()}
    yield
    server.wait(lambda: at_rest(server), what="at rest after the fault")
    good = server.chat(GOOD, max_tokens=4)
    assert good.status == 200, good.body
    assert not SECRETS.search(json.dumps(good.json)), good.body
    server.wait(lambda: server.pids().keys() == before.keys(), what="every process answers")
    after = server.pids()
    others = [name for name in before if before[name] != after[name]]
    assert others == [name for name in before if name in struck], "other processes than before"
    grown = {name: resident(pid) - memory[name] for name, pid in after.items()}
    measured = "memory grew by " + ", ".join(f"{n >> 20} MB ({name})" for name, n in grown.items())
    print(measured)
    assert max(grown.values()) < GROWTH, measured


def resident(pid: int) -> int:
    return int(psutil.Process(pid).memory_info().rss)
