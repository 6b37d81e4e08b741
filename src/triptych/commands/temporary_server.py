"""A ``triptych serve`` of our own for as long as it is needed, on a port that nobody has."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TextIO

import msgspec

from triptych.commands.client import Client
from triptych.commands.launch import base_url
from triptych.config import Config, key_environment, to_flags
from triptych.environment import without_settings
from triptych.errors import ServiceError, StartError
from triptych.host import free_port

STOP_SECONDS = 60.0
TELL_SECONDS = 2.0  # after the start; later less and less often
TELL_SHARE = 0.2  # of the time so far
LAST_WORDS = 2000  # characters of the server's log to show when it fails
Say = Callable[[str], None]


@contextmanager
def temporary_server(config: Config, say: Say) -> Iterator[Client]:
    """Ready when the scope opens; stopped on the way out, and with us if we are killed.

    ``config`` is resolved and checked. ``say`` hears how the start goes on. It may take as long as
    the model needs: a server whose processes never come up ends by itself.
    """
    config = msgspec.structs.replace(config, port=free_port(config.host, 0))
    serve = [sys.executable, "-m", "triptych", "serve", *to_flags(config)]
    argv = [sys.executable, "-m", "triptych.runtime.parent_death", str(os.getpid()), *serve]
    env = without_settings(os.environ) | key_environment(config)
    with tempfile.TemporaryFile("w+", errors="replace") as log:
        process = subprocess.Popen(argv, env=env, stderr=log)
        try:
            client = Client(base_url(config), next(iter(config.api_keys), ""))
            if not _ready(client, process, log, say):
                log.seek(0)
                words = log.read()[-LAST_WORDS:]
                raise StartError(f"the server ended before it was ready. Its last words:\n{words}")
            yield client
        finally:
            _stop(process)


def last_line(log: TextIO) -> str:
    """What a process of the server said last: `[E-0] loading weights ... 40%`."""
    size = os.fstat(log.fileno()).st_size
    start = max(0, size - LAST_WORDS)
    words = os.pread(log.fileno(), size - start, start).decode(errors="replace")
    return next((line.strip() for line in reversed(words.splitlines()) if line[:1] == "["), "")


def _ready(client: Client, process: subprocess.Popen[bytes], log: TextIO, say: Say) -> bool:
    """False: it has ended."""
    start, told = time.monotonic(), 0.0
    while process.poll() is None:
        passed = time.monotonic() - start
        if passed - told >= max(TELL_SECONDS, passed * TELL_SHARE):
            say(f"starting  {passed:.0f} s  {last_line(log)}".rstrip())
            told = passed
        try:
            if client.ready():
                say(f"ready     after {time.monotonic() - start:.1f} s")
                return True
        except ServiceError:
            pass  # it listens, but a worker is missing yet
        time.sleep(0.1)
    return False


def _stop(process: subprocess.Popen[bytes]) -> None:
    process.send_signal(signal.SIGINT)
    try:
        process.wait(STOP_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
