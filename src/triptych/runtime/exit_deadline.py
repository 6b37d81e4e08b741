"""The last bound on a process that ends: it exits in time, whatever it still waits for."""

from __future__ import annotations

import faulthandler
import logging
import os
import threading

log = logging.getLogger(__name__)
CLOSE_SECONDS = 10.0  # to give back what a process holds, once it has decided to end
GIL_SECONDS = 5.0  # more, where code outside of Python lets no thread of ours run


def exit_within(seconds: float, code: int) -> None:
    """Exit with ``code`` after so long: an engine, a disk or a driver may block its closing.

    Where even that thread cannot run, the process exits with code 1, and says where it stood.
    """

    def give_up() -> None:
        log.error("the process could not close within %g s: it exits now", seconds)
        os._exit(code)

    timer = threading.Timer(seconds, give_up)
    timer.daemon = True
    timer.start()
    faulthandler.dump_traceback_later(seconds + GIL_SECONDS, exit=True)
