"""SGLang running: its client in this process, and the processes that are its engine.

Its own server ends the whole process when one of them fails. Here that is told instead: whoever
waits gets WorkerLost, ``died`` is set, and the worker ends in order. Leans on the inside of
SGLang's TokenizerManager; tests/sglang holds it to the version that is installed.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import ctypes
import logging
import os
import select
import signal
import threading
from collections.abc import AsyncIterator, Iterable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from triptych.engines.adapter.leftovers import EngineProcesses
from triptych.errors import StartError, WorkerLost

log = logging.getLogger(__name__)
IGNORE = 1  # SIG_IGN
TESTED_VERSION = "0.5.23"


class SGLangProcesses:
    """Started when made, which takes long. ``client`` is SGLang's Engine."""

    def __init__(self, server_args: Any) -> None:
        self.died = asyncio.Event()
        self._gone = threading.Event()  # one of its processes has ended
        self._closing = threading.Event()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._reading: asyncio.Task[None] | None = None
        self._calls: set[asyncio.Timeout] = set()
        started: Future[Any] = Future()
        # The processes end with the thread that started them: it stays, and watches them.
        keeper = threading.Thread(target=self._keep, args=(server_args, started), daemon=True)
        keeper.start()
        self.client = started.result()
        self.manager = self.client.tokenizer_manager
        self._leftovers = EngineProcesses(self.client.get_all_child_pids())

    @contextlib.asynccontextmanager
    async def call(self) -> AsyncIterator[None]:
        """For the time of a request; raises WorkerLost when the engine dies meanwhile."""
        self._attend()
        alive = asyncio.timeout(None)
        try:
            async with alive:
                self._calls.add(alive)
                yield
        except TimeoutError:
            if not alive.expired():
                raise
            raise _lost() from None
        finally:
            self._calls.discard(alive)

    def close(self) -> None:
        self._closing.set()
        atexit.unregister(self.client.shutdown)  # which ends other children of this process too
        if (watchdog := getattr(self.manager, "_subprocess_watchdog", None)) is not None:
            watchdog.stop()
        self._leftovers.clear()
        if self._reading is not None:
            self._reading.cancel()
        self._release()

    def _attend(self) -> None:
        """Read what the engine answers, on the event loop of the first who asks.

        As the TokenizerManager does by itself, which would take this process's signals as well.
        """
        if self._loop is None:
            self._loop = asyncio.get_running_loop()
            self.manager.event_loop = self._loop
            self._reading = self._loop.create_task(self.manager.handle_loop())
            self._reading.add_done_callback(self._stopped)
        if self._gone.is_set():
            self._die()
            raise _lost()

    def _stopped(self, reading: asyncio.Task[None]) -> None:
        if not reading.cancelled():
            log.error("SGLang's client can't go on", exc_info=reading.exception())
            self._gone.set()
            self._die()

    def _die(self) -> None:
        if self.died.is_set():  # whoever waited is on its way out, and can't be told twice
            return
        self.died.set()
        for call in self._calls:
            call.reschedule(asyncio.get_running_loop().time())

    def _keep(self, server_args: Any, started: Future[Any]) -> None:
        """A thread: start SGLang, and then tell when one of its processes ends."""
        try:
            with _kept_logging():
                client = _start(server_args)
            watched = _watched(client.get_all_child_pids())
        except BaseException as error:  # noqa: BLE001 (it is raised where it is waited for)
            started.set_exception(error)
            return
        started.set_result(client)
        poll = select.poll()
        for descriptor in watched:
            poll.register(descriptor, select.POLLIN)
        ended = [watched[descriptor] for descriptor, _ in poll.poll()]
        for descriptor in watched:
            os.close(descriptor)
        if not self._closing.is_set():
            log.error("a process of SGLang's (%s) has ended", ", ".join(map(str, ended)))
            self._gone.set()
            if self._loop is not None and not self._loop.is_closed():
                self._loop.call_soon_threadsafe(self._die)
        self._closing.wait()  # its other processes may live that long

    def _release(self) -> None:
        """What SGLang leaves behind: its part in this process, and names of sockets in files."""
        for part in ("bootstrap_server", "mm_processor"):
            held = getattr(self.manager, part, None)
            if end := getattr(held, "close", None) or getattr(held, "shutdown", None):
                end()
        for socket in (
            self.manager.recv_from_detokenizer,
            self.manager.send_to_scheduler,
            self.client.send_to_rpc,
        ):
            socket.close(linger=0)
        for name in vars(self.client.port_args).values():
            if isinstance(name, str) and name.startswith("ipc://"):
                Path(name.removeprefix("ipc://")).unlink(missing_ok=True)


def _start(server_args: Any) -> Any:
    # A scheduler that fails sends its parent this signal, which would end the worker without a
    # word. Python sets signals from its main thread only, and this is not that.
    ctypes.CDLL(None).signal(int(signal.SIGQUIT), ctypes.c_void_p(IGNORE))
    from sglang.srt.entrypoints.engine import Engine
    from sglang.version import __version__

    if __version__ != TESTED_VERSION:
        log.warning("this is SGLang %s; Triptych was tested with %s", __version__, TESTED_VERSION)

    class Client(Engine):  # type: ignore[misc]
        @classmethod
        def _launch_detokenizer_subprocesses(cls, **_options: Any) -> tuple[list[Any], list[str]]:
            """None: without a tokenizer the scheduler answers straight to us."""
            return [], []

    try:
        client = Client(server_args=server_args)
    except (RuntimeError, ValueError) as error:
        raise StartError(f"SGLang did not start: {error}") from error
    client.loop.close()  # for calls that block, of which there are none
    return client


def _watched(pids: Iterable[int]) -> dict[int, int]:
    """A descriptor that tells when it ends, for each process."""
    try:
        return {os.pidfd_open(pid): pid for pid in pids}
    except ProcessLookupError:
        raise StartError("SGLang did not start: one of its processes has ended") from None


@contextlib.contextmanager
def _kept_logging() -> Iterator[None]:
    """SGLang sets up logging for the whole process: take that back."""
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    try:
        yield
    finally:
        root.handlers[:] = handlers
        root.setLevel(level)


def _lost() -> WorkerLost:
    return WorkerLost("SGLang's engine has ended. Try again.")
