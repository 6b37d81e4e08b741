"""Starts the processes of a server, restarts what dies, and stops them in order.

A process that never comes up is not tried for ever: the supervisor gives up with its last words. No
process outlives the supervisor, not even a killed one. What the processes do, and whether they are
ready, others know.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping, Sequence

from msgspec import Struct

from triptych.errors import StartError
from triptych.observe import progress
from triptych.runtime.parent_death import EXIT_START_ERROR
from triptych.runtime.process import on_stop_signal

FIRST_BACKOFF = 0.2  # seconds before a restart; doubled with each death in a row
LAST_BACKOFF = 10.0
STEADY_SECONDS = 30.0  # alive for so long: earlier deaths are forgotten
MAX_START_FAILURES = 5  # deaths in a row before a process was ever ready
LAST_LINES = 20  # lines of stderr to show when giving up
RELAY_SECONDS = 1.0  # for the last lines of a dead process
LONGEST_LINE = 64 << 10
EXIT_FORCED = 130  # told twice to stop: what ran was not let finish

Say = Callable[[str], None]


class SupervisedProcess(Struct, frozen=True):
    """A process to keep alive."""

    name: str
    argv: Sequence[str]
    env: Mapping[str, str] | None = None  # None: ours
    stop_order: int = 0  # lower ones are stopped first, and have ended before the next are
    up: str = ""  # words in the line by which it tells that its start is over


def consecutive_failures(before: int, lived: float, once_ready: bool) -> int:
    """With this one, after ``lived`` seconds. A process that was never ready was not steady,
    however long its start took."""
    return 1 if once_ready and lived >= STEADY_SECONDS else before + 1


def restart_delay(deaths: int) -> float:
    """Seconds before the next start."""
    return min(LAST_BACKOFF, FIRST_BACKOFF * 2.0 ** (deaths - 1))


class Supervisor:
    """Keeps its children alive until it is told to stop (``stop``, SIGTERM, SIGHUP or Ctrl-C).

    ``farewell`` is said when it is.
    """

    def __init__(
        self,
        children: Sequence[SupervisedProcess],
        *,
        stop_seconds: float = 35.0,
        say: Say | None = None,
        farewell: str = "",
    ) -> None:
        self._stop_seconds = stop_seconds  # for each stop_order, then SIGKILL
        self._say = say or progress.print_status
        self._farewell = farewell
        self._stopping = asyncio.Event()
        self._hurrying = asyncio.Event()
        self._keepers = {child.name: _Keeper(child, self._say) for child in children}

    async def run(self) -> int:
        """Run the children. Gives the exit code; raises StartError when one never comes up."""
        with on_stop_signal(self.stop):
            stopping = asyncio.create_task(self._stopping.wait())
            tasks = [keeper.start() for keeper in self._keepers.values()]
            try:
                await asyncio.wait([stopping, *tasks], return_when=asyncio.FIRST_COMPLETED)
            finally:
                stopping.cancel()
                await self._stop_all()
            # All are asked, for several may have given up together; the first one's words are told.
            for error in [task.exception() for task in tasks]:
                if error is not None:
                    raise error
            return EXIT_FORCED if self._hurrying.is_set() else 0

    def stop(self) -> None:
        """Let all end: SIGTERM, time to drain, SIGKILL. Told twice: SIGKILL now."""
        if self._stopping.is_set():
            self._hurrying.set()
            return
        self._stopping.set()
        if self._farewell:
            self._say(self._farewell)

    def ready(self, *names: str) -> None:
        """These (none: all) have come up: from now on they are restarted whatever happens."""
        for name in names or self._keepers:
            self._keepers[name].once_ready = True

    def starting(self) -> dict[str, str]:
        """Those that have not told that they are up, each with the last line it said."""
        return {
            name: keeper.phase
            for name, keeper in self._keepers.items()
            if keeper.child.up and not keeper.is_up
        }

    def pid_of(self, name: str) -> int | None:
        """None: not running at the moment."""
        return self._keepers[name].pid

    def restarts_of(self, name: str) -> int:
        return self._keepers[name].restarts

    async def _stop_all(self) -> None:
        hurrying = asyncio.create_task(self._hurrying.wait())
        for order in sorted({keeper.child.stop_order for keeper in self._keepers.values()}):
            group = [k for k in self._keepers.values() if k.child.stop_order == order]
            waiting = {asyncio.create_task(keeper.stop()) for keeper in group}
            deadline = asyncio.get_running_loop().time() + self._stop_seconds
            while waiting and not hurrying.done():
                left = deadline - asyncio.get_running_loop().time()
                if left <= 0:
                    break
                done, _ = await asyncio.wait(
                    {*waiting, hurrying}, timeout=left, return_when=asyncio.FIRST_COMPLETED
                )
                waiting -= done
            for keeper in group:
                keeper.kill()
            await asyncio.gather(*waiting)
        hurrying.cancel()


class _Keeper:
    """One child and its incarnations."""

    def __init__(self, child: SupervisedProcess, say: Say) -> None:
        self.child = child
        self.pid: int | None = None
        self.restarts = 0
        self.once_ready = False
        self.is_up = False
        self.phase = ""
        self._say = say
        self._stopping = asyncio.Event()
        self._last_words: deque[str] = deque(maxlen=LAST_LINES)
        self._task: asyncio.Task[None] | None = None

    def start(self) -> asyncio.Task[None]:
        self._task = asyncio.create_task(self._keep(), name=f"keep {self.child.name}")
        return self._task

    async def stop(self) -> None:
        """Ask the child to end, and wait until it has."""
        self._stopping.set()
        self._signal(signal.SIGTERM)
        if self._task is not None:
            await asyncio.wait([self._task])

    def kill(self) -> None:
        self._signal(signal.SIGKILL)

    async def _keep(self) -> None:
        clock = asyncio.get_running_loop().time
        deaths = 0
        while not self._stopping.is_set():
            started = clock()
            code = await self._live()
            if self._stopping.is_set():
                return
            deaths = consecutive_failures(deaths, clock() - started, self.once_ready)
            # Whoever is refused at its first start never came up, though all may be called ready:
            # others of the same cluster can stand in for it.
            never = not (self.once_ready and self.restarts)
            if (code == EXIT_START_ERROR and never) or (
                deaths >= MAX_START_FAILURES and not self.once_ready
            ):
                raise StartError(self._obituary(code))
            pause = restart_delay(deaths)
            self._tell(f"{_fate(code)}; it starts again in {pause:.1f} s")
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(pause):
                    await self._stopping.wait()
            self.restarts += 1

    async def _live(self) -> int:
        """One incarnation, from start to death. Gives its exit code."""
        self.is_up, self.phase = False, "starting"
        try:
            async with self._relay() as stderr:
                process = await self._spawn(stderr)
                self.pid = process.pid
                if self._stopping.is_set():
                    self._signal(signal.SIGTERM)  # it came while the process was being made
                try:
                    return await process.wait()
                finally:
                    self._signal(signal.SIGKILL)  # what it started and left behind
                    self.pid = None
        except OSError as error:  # no descriptors, no memory: perhaps there are some later
            self._hear(f"cannot be started: {error.strerror}".encode())
            return 1

    async def _spawn(self, stderr: int) -> asyncio.subprocess.Process:
        try:
            return await asyncio.create_subprocess_exec(
                sys.executable,
                *("-m", "triptych.runtime.parent_death", str(os.getpid()), *self.child.argv),
                env=None if self.child.env is None else dict(self.child.env),
                stdin=asyncio.subprocess.DEVNULL,
                stderr=stderr,
                # Ctrl-C is for us alone: we stop them in order. Not by a session of its own: Linux
                # shares cores among sessions, so an engine that yields while it waits would yield
                # to nobody of another one, and its tokens would wait for the frontend's turn.
                process_group=0,
            )
        finally:
            os.close(stderr)

    @contextlib.asynccontextmanager
    async def _relay(self) -> AsyncIterator[int]:
        """A file descriptor whose lines are said with the child's name before them.

        Not asyncio's own pipe: that one makes the wait for a process a wait for all who hold it.
        """
        reading, writing = os.pipe()
        reader = asyncio.StreamReader()
        loop = asyncio.get_running_loop()
        transport, _ = await loop.connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(reading, "rb")
        )
        relaying = asyncio.create_task(self._say_lines(reader))
        try:
            yield writing
        finally:
            await asyncio.wait([relaying], timeout=RELAY_SECONDS)
            relaying.cancel()
            transport.close()

    async def _say_lines(self, reader: asyncio.StreamReader) -> None:
        rest = b""
        while chunk := await reader.read(LONGEST_LINE):
            *lines, rest = (rest + chunk).split(b"\n")
            if len(rest) > LONGEST_LINE:
                lines, rest = [*lines, rest], b""
            for line in lines:
                self._hear(line)
        if rest:
            self._hear(rest)

    def _hear(self, line: bytes) -> None:
        text = line.decode(errors="replace").rstrip("\r")
        self._last_words.append(text)
        self.is_up = self.is_up or (bool(self.child.up) and self.child.up in text)
        if text and not text.startswith("{"):  # a structured log line is no phase
            self.phase = text
        self._tell(text)

    def _tell(self, text: str) -> None:
        self._say(f"[{self.child.name}] {text}")

    def _signal(self, number: signal.Signals) -> None:
        """To the process; SIGKILL to its whole group."""
        if self.pid is None:
            return
        with contextlib.suppress(ProcessLookupError):
            (os.killpg if number == signal.SIGKILL else os.kill)(self.pid, number)

    def _obituary(self, code: int) -> str:
        words = "\n".join(f"  {line}" for line in self._last_words) or "  (nothing)"
        return f"{self.child.name} does not come up: it {_fate(code)}. Its last words:\n{words}"


def _fate(code: int) -> str:
    if code >= 0:
        return f"exited with code {code}"
    try:
        return f"was ended by {signal.Signals(-code).name}"
    except ValueError:
        return f"was ended by signal {-code}"
