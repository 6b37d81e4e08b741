"""The signals that ask a process to stop: SIGTERM, Ctrl-C, and SIGHUP when its terminal is gone."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import Callable, Iterator


def stop_signals() -> list[signal.Signals]:
    """Those that are to be heeded: under ``nohup`` SIGHUP is not."""
    heeded = [signal.SIGTERM, signal.SIGINT]
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
        heeded.append(signal.SIGHUP)
    return heeded


@contextlib.contextmanager
def on_stop(then: Callable[[], None]) -> Iterator[None]:
    """Inside, each of them calls ``then`` on the running loop."""
    loop, numbers = asyncio.get_running_loop(), stop_signals()
    for number in numbers:
        loop.add_signal_handler(number, then)
    try:
        yield
    finally:
        for number in numbers:
            loop.remove_signal_handler(number)
