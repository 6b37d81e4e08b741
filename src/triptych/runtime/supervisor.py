"""Starts the processes of a server, restarts those that die, and stops them in order.

Gives up on a process that never becomes ready, with its last lines of output. No process outlives
the supervisor, not even a killed one. Does not know what the processes do.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from typing import Protocol

from msgspec import Struct

from triptych.errors import StartError
from triptych.observe.log import print_status
from triptych.runtime.concurrency import wait_at_most
from triptych.runtime.parent_death import EXIT_START_ERROR, dying_with_us
from triptych.runtime.process import on_stop_signal

FIRST_BACKOFF = 0.2  # seconds before a restart; doubled with each failure in a row
LAST_BACKOFF = 10.0
STEADY_SECONDS = 30.0  # after so long alive, earlier failures do not count
MAX_START_FAILURES = 5  # in a row before a process was ever ready
LAST_LINES = 20  # of stderr, shown when giving up
RELAY_SECONDS = 1.0  # for the last lines of a dead process
LONGEST_LINE = 64 << 10
EXIT_FORCED = 130  # a second signal: processes were killed before they had drained


class Child(Protocol):
    """A process that can run again after it has ended."""

    @property
    def pid(self) -> int | None:
        """None: it is not running on this machine at the moment."""

    @property
    def last_lines(self) -> Iterable[str]:
        """Of its stderr."""

    async def run(self) -> int:
        """Start it and wait until it ends. Returns its exit code."""

    def stop(self) -> None:
        """Ask it to end."""

    def kill(self) -> None:
        """End it now, so that ``run`` returns."""


class SupervisedProcess(Struct, frozen=True):
    """A process to keep running."""

    name: str
    argv: Sequence[str] = ()
    env: Mapping[str, str] | None = None  # None: ours
    stop_order: int = 0  # lower ones stop first; the next order waits for them
    up: str = ""  # part of the line that it prints when it has started
    elsewhere: Child | None = None  # runs instead of argv, as soon as there is a place for it


class Supervisor:
    """Keeps its processes running until ``stop`` is called or a stop signal arrives.

    ``stop_seconds``: for each stop order to drain, then SIGKILL. ``farewell`` is printed when
    stopping begins.
    """

    def __init__(
        self,
        processes: Sequence[SupervisedProcess],
        *,
        stop_seconds: float = 35.0,
        say: Callable[[str], None] | None = None,
        farewell: str = "",
    ) -> None:
        self._stop_seconds = stop_seconds
        self._say = say or print_status
        self._farewell = farewell
        self._stopping = asyncio.Event()
        self._forced = asyncio.Event()
        self._keepers = {one.name: _Keeper(one, self._say) for one in processes}

    async def run(self) -> int:
        """Run the processes; returns the exit code. Raises StartError if one never gets ready."""
        with on_stop_signal(self.stop):
            stopping = asyncio.create_task(self._stopping.wait())
            tasks = [keeper.start() for keeper in self._keepers.values()]
            try:
                await asyncio.wait([stopping, *tasks], return_when=asyncio.FIRST_COMPLETED)
            finally:
                stopping.cancel()
                await self._stop_all()
            # Retrieve all exceptions, since several may have given up together; raise the first.
            for error in [task.exception() for task in tasks]:
                if error is not None:
                    raise error
            return EXIT_FORCED if self._forced.is_set() else 0

    def stop(self) -> None:
        """Stop all: SIGTERM, time to drain, SIGKILL. A second call sends SIGKILL now."""
        if self._stopping.is_set():
            self._forced.set()
            return
        self._stopping.set()
        if self._farewell:
            self._say(self._farewell)

    def ready(self, *names: str) -> None:
        """These processes (none named: all) have become ready: from now on always restart them."""
        for name in names or self._keepers:
            self._keepers[name].once_ready = True

    def starting(self) -> dict[str, str]:
        """The processes that have not printed their ``up`` line, each with its last line."""
        return {
            name: keeper.phase
            for name, keeper in self._keepers.items()
            if keeper.spec.up and not keeper.is_up
        }

    def pid_of(self, name: str) -> int | None:
        """The process id; None: it is not running at the moment."""
        return self._keepers[name].child.pid

    def restarts_of(self, name: str) -> int:
        return self._keepers[name].restarts

    async def _stop_all(self) -> None:
        forced = asyncio.create_task(self._forced.wait())
        for order in sorted({keeper.spec.stop_order for keeper in self._keepers.values()}):
            group = [k for k in self._keepers.values() if k.spec.stop_order == order]
            waiting = {asyncio.create_task(keeper.stop()) for keeper in group}
            deadline = asyncio.get_running_loop().time() + self._stop_seconds
            while waiting and not forced.done():
                left = deadline - asyncio.get_running_loop().time()
                if left <= 0:
                    break
                done, _ = await asyncio.wait(
                    {*waiting, forced}, timeout=left, return_when=asyncio.FIRST_COMPLETED
                )
                waiting -= done
            for keeper in group:
                keeper.child.kill()
            await asyncio.gather(*waiting)
        forced.cancel()


class _Keeper:
    """One child and its incarnations."""

    def __init__(self, spec: SupervisedProcess, say: Callable[[str], None]) -> None:
        self.spec = spec
        self.child: Child = spec.elsewhere or LocalChild(spec, self._handle_line)
        self.restarts = 0
        self.once_ready = False
        self.is_up = False
        self.phase = ""
        self._say = say
        self._stopping = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    def start(self) -> asyncio.Task[None]:
        self._task = asyncio.create_task(self._run(), name=f"supervise {self.spec.name}")
        return self._task

    async def stop(self) -> None:
        """Ask the process to end, and wait until it has."""
        self._stopping.set()
        self.child.stop()
        if self._task is not None:
            await asyncio.wait([self._task])

    async def _run(self) -> None:
        clock = asyncio.get_running_loop().time
        failures = 0
        while not self._stopping.is_set():
            started = clock()
            self.is_up, self.phase = False, "starting"
            code = await self.child.run()
            if self._stopping.is_set():
                return
            # A process that was ready and lived long begins to count anew; a long start does not.
            steady = self.once_ready and clock() - started >= STEADY_SECONDS
            failures = 1 if steady else failures + 1
            if self._is_hopeless(code, failures):
                lines = "\n".join(f"  {line}" for line in self.child.last_lines) or "  (nothing)"
                raise StartError(
                    f"{self.spec.name} does not start: it {_describe_exit(code)}. Its last "
                    f"lines:\n{lines}"
                )
            pause = min(LAST_BACKOFF, FIRST_BACKOFF * 2.0 ** (failures - 1))
            self._print(f"{_describe_exit(code)}; restarting in {pause:.1f} s")
            await wait_at_most(self._stopping, pause)
            self.restarts += 1

    def _is_hopeless(self, code: int, failures: int) -> bool:
        """Whether a process that was never ready is not worth another start."""
        if not self.once_ready:
            return code == EXIT_START_ERROR or failures >= MAX_START_FAILURES
        # One that is refused at its first start was never ready, even if ``ready`` was called for
        # all: others of the cluster can serve in its place. Elsewhere that start may come late.
        first = not self.restarts and self.spec.elsewhere is None
        return code == EXIT_START_ERROR and first

    def _handle_line(self, text: str) -> None:
        self.is_up = self.is_up or (bool(self.spec.up) and self.spec.up in text)
        if text and not text.startswith("{"):  # skip JSON log lines
            self.phase = text
        self._print(text)

    def _print(self, text: str) -> None:
        self._say(f"[{self.spec.name}] {text}")


class LocalChild:
    """A process of this machine, which dies with us. Its stderr goes to ``on_line``."""

    def __init__(self, spec: SupervisedProcess, on_line: Callable[[str], None]) -> None:
        self.pid: int | None = None
        self.last_lines: deque[str] = deque(maxlen=LAST_LINES)
        self._spec = spec
        self._on_line = on_line
        self._stopping = False

    async def run(self) -> int:
        try:
            async with self._relay() as stderr:
                process = await self._spawn(stderr)
                self.pid = process.pid
                if self._stopping:
                    self._signal(signal.SIGTERM)  # stop was called while the process was starting
                try:
                    return await process.wait()
                finally:
                    self._signal(signal.SIGKILL)  # and any children it left behind
                    self.pid = None
        except OSError as error:  # out of descriptors or memory, perhaps not for long
            self._handle_line(f"cannot start: {error.strerror}".encode())
            return 1

    def stop(self) -> None:
        self._stopping = True
        self._signal(signal.SIGTERM)

    def kill(self) -> None:
        self._signal(signal.SIGKILL)

    async def _spawn(self, stderr: int) -> asyncio.subprocess.Process:
        try:
            return await asyncio.create_subprocess_exec(
                *dying_with_us(self._spec.argv),
                env=None if self._spec.env is None else dict(self._spec.env),
                stdin=asyncio.subprocess.DEVNULL,
                stderr=stderr,
                # Keep Ctrl-C from the children: we stop them in order. Not a session of its own:
                # Linux divides cores among sessions, so an engine that yields while it waits
                # would not yield to the frontend, which would delay tokens.
                process_group=0,
            )
        finally:
            os.close(stderr)

    @contextlib.asynccontextmanager
    async def _relay(self) -> AsyncIterator[int]:
        """A file descriptor whose lines are printed after the process's name.

        Not asyncio's own pipe: with that, waiting for a process waits for all that hold the pipe.
        """
        reading, writing = os.pipe()
        reader = asyncio.StreamReader()
        loop = asyncio.get_running_loop()
        transport, _ = await loop.connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(reading, "rb")
        )
        relaying = asyncio.create_task(self._relay_lines(reader))
        try:
            yield writing
        finally:
            await asyncio.wait([relaying], timeout=RELAY_SECONDS)
            relaying.cancel()
            transport.close()

    async def _relay_lines(self, reader: asyncio.StreamReader) -> None:
        rest = b""
        while chunk := await reader.read(LONGEST_LINE):
            *lines, rest = (rest + chunk).split(b"\n")
            if len(rest) > LONGEST_LINE:
                lines, rest = [*lines, rest], b""
            for line in lines:
                self._handle_line(line)
        if rest:
            self._handle_line(rest)

    def _handle_line(self, line: bytes) -> None:
        text = line.decode(errors="replace").rstrip("\r")
        self.last_lines.append(text)
        self._on_line(text)

    def _signal(self, number: signal.Signals) -> None:
        """Send a signal to the process; SIGKILL goes to its whole group."""
        if self.pid is None:
            return
        with contextlib.suppress(ProcessLookupError):
            (os.killpg if number == signal.SIGKILL else os.kill)(self.pid, number)


def _describe_exit(code: int) -> str:
    if code >= 0:
        return f"exited with code {code}"
    try:
        return f"was killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"was killed by signal {-code}"
