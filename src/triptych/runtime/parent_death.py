"""Makes the kernel kill a process when its parent dies, however it dies (Linux only).

Run as a program, sets that up and then becomes another program, which keeps the setting. Imports
nothing heavy: the supervisor starts every process through it.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections.abc import Sequence

_PR_SET_PDEATHSIG, _PR_GET_PDEATHSIG = 1, 2
EXIT_START_ERROR = 2


def die_with_parent(parent: int) -> None:
    """Have the kernel kill this process when ``parent`` dies; exit now if it is dead.

    Call it first thing in the child.
    """
    if sys.platform != "linux":
        return
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0) != 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    if os.getppid() != parent:
        os._exit(1)


def dying_with_us(argv: Sequence[str]) -> list[str]:
    """The command line that starts ``argv`` so that it dies with this process."""
    return [sys.executable, "-m", "triptych.runtime.parent_death", str(os.getpid()), *argv]


def dies_with_parent() -> bool:
    """Whether one of our processes started this one, with ``die_with_parent``."""
    if sys.platform != "linux":
        return False
    number = ctypes.c_int()
    ctypes.CDLL(None).prctl(_PR_GET_PDEATHSIG, ctypes.byref(number), 0, 0, 0)
    return number.value != 0


def main(words: list[str]) -> None:
    """``PARENT COMMAND...``: become COMMAND, which dies with PARENT."""
    parent, *argv = words
    die_with_parent(int(parent))
    try:
        os.execvp(argv[0], argv)
    except OSError as error:
        print(f"cannot start {argv[0]}: {error.strerror}", file=sys.stderr)
        sys.exit(EXIT_START_ERROR)


if __name__ == "__main__":
    main(sys.argv[1:])
