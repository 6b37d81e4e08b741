"""A whole server in the process of the tests: frontend and workers as threads, each with its own
event loop, over the real discovery, request plane, transfer and decode pool.

For tests that compare tokens, where process boundaries are not the point: starting a server costs
a second instead of five to twenty of CPU time, because torch is imported once. A server that is
started as a user starts it, with real processes: ``support.servers``.
"""

from __future__ import annotations

import gc
import json
import os
import signal
import threading
import time
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import msgspec
import uvloop

from support.servers import START_SECONDS, TestServer
from support.templates import template
from triptych import cli
from triptych.api import process
from triptych.commands import launch
from triptych.host import free_port
from triptych.runtime import run_dir
from triptych.stages.process import run_worker

SECRET = "of one process"
STOP_SECONDS = 60


class _Loop(uvloop.Loop):
    """Signals belong to the main thread; here ``_Part.stop`` calls their handlers."""

    def __init__(self) -> None:
        super().__init__()
        self.on_stop: list[Callable[[], None]] = []

    def add_signal_handler(self, sig: int, callback: Callable[..., Any], *args: Any) -> None:
        if sig == signal.SIGTERM:
            self.on_stop.append(lambda: callback(*args))

    def remove_signal_handler(self, sig: int) -> bool:
        return True


class _Part(threading.Thread):
    """The frontend or one worker."""

    def __init__(self, name: str, main: Coroutine[Any, Any, int]) -> None:
        super().__init__(name=name, daemon=True)
        self.loop = _Loop()
        self.error: BaseException | None = None
        self._main = main
        self.start()

    def run(self) -> None:
        try:
            self.loop.run_until_complete(self._main)
        except BaseException as error:  # noqa: BLE001 - _Threads raises it again
            self.error = error
        finally:
            self.loop.run_until_complete(self.loop.shutdown_asyncgens())
            self.loop.run_until_complete(self.loop.shutdown_default_executor())
            self.loop.close()

    def stop(self) -> None:
        end = time.monotonic() + STOP_SECONDS
        while self.is_alive():
            assert time.monotonic() < end, f"{self.name} does not stop"
            with suppress(RuntimeError):  # its loop is closed already
                self.loop.call_soon_threadsafe(self._call_handlers)
            self.join(0.2)  # it may not have come to its handlers yet

    def _call_handlers(self) -> None:
        for handler in self.loop.on_stop:
            handler()


class _Threads:
    """What ``TestServer`` asks of a process."""

    def __init__(self) -> None:
        self.parts: list[_Part] = []
        self.pid = os.getpid()

    def poll(self) -> int | None:
        dead = [part for part in self.parts if not part.is_alive()]
        self.raise_error()
        return 0 if dead else None

    def raise_error(self) -> None:
        for part in self.parts:
            if part.error is not None:
                raise part.error

    def stop(self) -> None:
        """The frontend first, as the supervisor does it, so that it can drain."""
        for part in self.parts:
            part.stop()
        self.raise_error()


@contextmanager
def serving_in_one_process(*flags: str) -> Iterator[TestServer]:
    """The same server as ``serving(*flags)`` starts; what it logs goes where the test's logs go."""
    with ExitStack() as scope:
        scope.enter_context(mock.patch.object(signal, "signal", _only_in_main_thread))
        collector = SimpleNamespace(collect=gc.collect, freeze=lambda: None, set_threshold=_ignore)
        scope.enter_context(mock.patch.multiple(process, gc=collector, exit_within=_ignore))
        config = launch.resolve(
            cli._config(cli._parser().parse_args(["serve", "--cpu-threads=1", *flags]))
        )
        launch.check_config(config)
        path = scope.enter_context(run_dir.use(config.run_dir))
        port = free_port("127.0.0.1", 0)
        config = msgspec.structs.replace(config, run_dir=str(path), port=port)
        threads = _Threads()
        server = TestServer(threads, port, os.devnull)  # type: ignore[arg-type]
        try:
            threads.parts.append(_Part("frontend", process._serve(config, SECRET)))
            for place in launch.place_topology(config):
                its, name = launch._placed(config, place), place.worker.id
                threads.parts.append(_Part(name, run_worker(its, place.worker.role, name, SECRET)))
            server.wait(server.complete, START_SECONDS, "every worker is ready")
            yield server
        finally:
            threads.stop()


_signal = signal.signal


@contextmanager
def serving_script(
    script: Sequence[Mapping[str, object]], folder: Path, pattern: str = "E/P/D"
) -> Iterator[TestServer]:
    """The fake engine with these replies, and a chat template that has a place for tools."""
    replies = folder / "replies.jsonl"
    replies.write_text("\n".join(json.dumps(line) for line in script))
    flags = (
        "--engine=fake",
        f"--pattern={pattern}",
        "--enable-multimodal",
        f"--chat-template={template('hermes')}",
        f"--fake-replies={replies}",
        "--served-model-name=panel",
    )
    with serving_in_one_process(*flags) as server:
        yield server


def _only_in_main_thread(number: Any, handler: Any) -> Any:
    if threading.current_thread() is threading.main_thread():
        return _signal(number, handler)
    return signal.getsignal(number)


def _ignore(*_: object) -> None:
    pass
