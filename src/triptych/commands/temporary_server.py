"""Runs ``triptych serve`` on a free port for a scope: for ``ask``, ``chat`` and ``demo``."""

from __future__ import annotations

import os
import secrets
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TextIO

import msgspec

from triptych.commands.client import Client, base_url
from triptych.config import Config, key_environment, to_flags
from triptych.environment import without_settings
from triptych.errors import ServiceError, StartError
from triptych.host import free_port
from triptych.runtime.parent_death import dying_with_us

STOP_SECONDS = 60.0
REPORT_SECONDS = 2.0  # first progress line; later ones are rarer
REPORT_SHARE = 0.2  # of the elapsed time between progress lines
LOG_TAIL = 2000  # characters of the server's log to show when it fails


@contextmanager
def temporary_server(config: Config, say: Callable[[str], None]) -> Iterator[Client]:
    """A ready server. It stops with the scope, and dies with this process. It has its own process
    group: Ctrl-C in a chat stops an answer, not the server.

    ``config`` is resolved and checked. ``say`` gets lines about the progress of the start, which
    has no deadline: a server whose processes do not start exits by itself.
    """
    config = msgspec.structs.replace(config, port=free_port(config.host, 0))
    if config.keys_file:  # it may hold digests of keys alone
        key = config.api_key or secrets.token_hex(16)
        config = msgspec.structs.replace(config, keys_file="", api_key=key)
    serve = [sys.executable, "-m", "triptych", "serve", *to_flags(config)]
    env = without_settings(os.environ) | key_environment(config)
    with tempfile.TemporaryFile("w+", errors="replace") as log:
        process = subprocess.Popen(dying_with_us(serve), env=env, stderr=log, process_group=0)
        try:
            key = next(iter(config.api_keys), "")
            client = Client(base_url(config), key, config.tls_cert)
            if not _ready(client, process, log, say):
                log.seek(0)
                words = log.read()[-LOG_TAIL:]
                raise StartError(f"the server exited before it was ready. End of its log:\n{words}")
            yield client
        finally:
            _stop(process)


def last_line(log: TextIO) -> str:
    """The last log line of a process of the server: `[E-0] loading weights ... 40%`."""
    size = os.fstat(log.fileno()).st_size
    start = max(0, size - LOG_TAIL)
    words = os.pread(log.fileno(), size - start, start).decode(errors="replace")
    return next((line.strip() for line in reversed(words.splitlines()) if line[:1] == "["), "")


def _ready(
    client: Client, process: subprocess.Popen[bytes], log: TextIO, say: Callable[[str], None]
) -> bool:
    """Wait until the server is ready. False: it has exited."""
    start, reported = time.monotonic(), 0.0
    while process.poll() is None:
        passed = time.monotonic() - start
        if passed - reported >= max(REPORT_SECONDS, passed * REPORT_SHARE):
            say(f"starting  {passed:.0f} s  {last_line(log)}".rstrip())
            reported = passed
        try:
            if client.ready():
                say(f"ready     after {time.monotonic() - start:.1f} s")
                return True
        except ServiceError:
            pass  # it listens, but workers are still missing
        time.sleep(0.1)
    return False


def _stop(process: subprocess.Popen[bytes]) -> None:
    process.send_signal(signal.SIGINT)
    try:
        process.wait(STOP_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
