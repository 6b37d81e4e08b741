"""SGLang's client in this process, and the processes of its engine.

SGLang's own server kills its whole process when one of them fails. Here every running request gets
WorkerLost, ``died`` is set, and the worker shuts down in order. Depends on the internals of
SGLang's TokenizerManager; tests/sglang checks it against the installed version.
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

from triptych.engines.adapter.processes import EngineProcesses
from triptych.errors import StartError, WorkerLost

log = logging.getLogger(__name__)
SIG_IGN = 1
TESTED_VERSION = "0.5.23"


class SGLangProcesses:
    """Starts SGLang, which takes long. ``client`` is SGLang's Engine, ``manager`` its manager."""

    def __init__(self, server_args: Any) -> None:
        self.died = asyncio.Event()
        self._process_ended = threading.Event()
        self._closing = threading.Event()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._reading: asyncio.Task[None] | None = None
        self._requests: set[asyncio.Timeout] = set()
        started: Future[Any] = Future()
        # SGLang's processes end with the thread that started them, so that thread stays.
        thread = threading.Thread(target=self._supervise, args=(server_args, started), daemon=True)
        thread.start()
        self.client = started.result()
        self.manager = self.client.tokenizer_manager
        self._processes = EngineProcesses(self.client.get_all_child_pids())

    @contextlib.asynccontextmanager
    async def request(self) -> AsyncIterator[None]:
        """The scope of one request; raises WorkerLost when the engine dies meanwhile."""
        self._start_reading()
        alive = asyncio.timeout(None)
        try:
            async with alive:
                self._requests.add(alive)
                yield
        except TimeoutError:
            if not alive.expired():
                raise
            raise _worker_lost() from None
        finally:
            self._requests.discard(alive)

    def close(self) -> None:
        self._closing.set()
        atexit.unregister(self.client.shutdown)  # it kills other children of this process too
        if (watchdog := getattr(self.manager, "_subprocess_watchdog", None)) is not None:
            watchdog.stop()
        self._processes.kill()
        if self._reading is not None:
            self._reading.cancel()
        self._release()

    def _start_reading(self) -> None:
        """Read the engine's outputs, on the event loop of the first request.

        The TokenizerManager would do so itself, but also install signal handlers.
        """
        if self._loop is None:
            self._loop = asyncio.get_running_loop()
            self.manager.event_loop = self._loop
            self._reading = self._loop.create_task(self.manager.handle_loop())
            self._reading.add_done_callback(self._on_reading_ended)
        if self._process_ended.is_set():
            self._die()
            raise _worker_lost()

    def _on_reading_ended(self, reading: asyncio.Task[None]) -> None:
        if not reading.cancelled():
            log.error("SGLang's client failed", exc_info=reading.exception())
            self._process_ended.set()
            self._die()

    def _die(self) -> None:
        if self.died.is_set():  # every request has its error, and a timeout expires once only
            return
        self.died.set()
        for request in self._requests:
            request.reschedule(asyncio.get_running_loop().time())

    def _supervise(self, server_args: Any, started: Future[Any]) -> None:
        """A thread: start SGLang and wait until one of its processes ends."""
        try:
            with _unchanged_logging():
                client = _start(server_args)
            watched = _pidfds(client.get_all_child_pids())
        except BaseException as error:  # noqa: BLE001 (__init__ raises it)
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
            log.error("SGLang's process %s has ended", ", ".join(map(str, ended)))
            self._process_ended.set()
            if self._loop is not None and not self._loop.is_closed():
                self._loop.call_soon_threadsafe(self._die)
        self._closing.wait()  # its other processes live as long as this thread

    def _release(self) -> None:
        """Close SGLang's parts in this process, and remove the files of its sockets."""
        for part in ("bootstrap_server", "mm_processor"):
            component = getattr(self.manager, part, None)
            shutdown = getattr(component, "close", None) or getattr(component, "shutdown", None)
            if shutdown is not None:
                shutdown()
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
    # A scheduler that fails sends its parent this signal, which would end the worker silently.
    # Python sets signal handlers in its main thread only, and this is another one.
    ctypes.CDLL(None).signal(int(signal.SIGQUIT), ctypes.c_void_p(SIG_IGN))
    from sglang.srt.entrypoints.engine import Engine
    from sglang.version import __version__

    if __version__ != TESTED_VERSION:
        log.warning("Triptych was tested with SGLang %s, not with %s", TESTED_VERSION, __version__)

    class Client(Engine):  # type: ignore[misc]
        @classmethod
        def _launch_detokenizer_subprocesses(cls, **_options: Any) -> tuple[list[Any], list[str]]:
            """None: without a tokenizer the scheduler sends its outputs directly to us."""
            return [], []

    try:
        client = Client(server_args=server_args)
    except (RuntimeError, ValueError) as error:
        raise StartError(f"SGLang did not start: {error}") from error
    client.loop.close()  # for blocking calls, which this adapter does not make
    return client


def _pidfds(pids: Iterable[int]) -> dict[int, int]:
    """A pidfd for each process: it becomes readable when the process ends."""
    try:
        return {os.pidfd_open(pid): pid for pid in pids}
    except ProcessLookupError:
        raise StartError("SGLang did not start: one of its processes has ended") from None


@contextlib.contextmanager
def _unchanged_logging() -> Iterator[None]:
    """Undo SGLang's set-up of logging for the whole process."""
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    try:
        yield
    finally:
        root.handlers[:] = handlers
        root.setLevel(level)


def _worker_lost() -> WorkerLost:
    return WorkerLost("SGLang's engine has died. Try again.")
