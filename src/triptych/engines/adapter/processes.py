"""The processes of an engine: kills all of them and removes the shared memory they leave behind.

A name in /dev/shm outlives the process that mapped it. An engine removes its names when it shuts
down in order, which takes seconds; a killed engine does not.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
from collections.abc import Iterable
from pathlib import Path

from triptych.host import process_start

_MAPPED = re.compile(r"(/dev/shm/\S+)$", re.MULTILINE)  # a removed name has "(deleted)" behind


class EngineProcesses:
    """The processes of ``pids`` and all their descendants."""

    def __init__(self, pids: Iterable[int]) -> None:
        # With their start times: the kernel may give a dead process's id to another one.
        self._roots = {pid: process_start(pid) for pid in pids}
        self._names: set[str] = set()
        self.record_shared_memory()

    def record_shared_memory(self) -> None:
        """Remember the names in /dev/shm that the processes map now."""
        for pid in self._living():
            with contextlib.suppress(OSError):
                self._names.update(_MAPPED.findall(Path(f"/proc/{pid}/maps").read_text()))

    def kill(self) -> None:
        """Remove the names and kill the processes; the calling process last, if it is one."""
        self.record_shared_memory()
        for name in self._names:
            Path(name).unlink(missing_ok=True)
        self._names.clear()
        for pid in reversed(self._living()):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def _living(self) -> list[int]:
        found = [pid for pid, start in self._roots.items() if start == process_start(pid) != 0]
        for pid in found:  # the loop appends children to the list that it reads
            for tasks in Path(f"/proc/{pid}/task").glob("*/children"):
                with contextlib.suppress(OSError):
                    found += map(int, tasks.read_text().split())
        return found
