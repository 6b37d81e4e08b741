"""What an engine's processes leave behind when they are killed: names in /dev/shm.

Memory under a name outlives whoever mapped it. An engine in processes of its own removes its names
when it ends in peace, which takes it seconds; killed, it does not.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
from collections.abc import Iterable
from pathlib import Path

_MAPPED = re.compile(r"(/dev/shm/\S+)$", re.MULTILINE)  # a removed one has words behind


class EngineProcesses:
    """Of the processes below those of ``pids``, themselves included."""

    def __init__(self, pids: Iterable[int]) -> None:
        # By when they were started, too: an id may be another's once its process is gone.
        self._roots = {pid: _started(pid) for pid in pids}
        self._names: set[str] = set()
        self.note()

    def note(self) -> None:
        """Remember what they have mapped by now."""
        for pid in self._family():
            with contextlib.suppress(OSError):
                self._names.update(_MAPPED.findall(Path(f"/proc/{pid}/maps").read_text()))

    def clear(self) -> None:
        """Remove the names, and kill those that still live; this process last, if it is one."""
        self.note()
        for name in self._names:
            Path(name).unlink(missing_ok=True)
        self._names.clear()
        for pid in reversed(self._family()):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def _family(self) -> list[int]:
        found = [pid for pid, started in self._roots.items() if started == _started(pid) != ""]
        for pid in found:  # which grows meanwhile
            for tasks in Path(f"/proc/{pid}/task").glob("*/children"):
                with contextlib.suppress(OSError):
                    found += map(int, tasks.read_text().split())
        return found


def _started(pid: int) -> str:
    """When a process was started, in the kernel's ticks; empty: there is none of this id."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except OSError:
        return ""
