"""Ties a process to its parent: when the parent dies, however it dies, so does the process.

Run as a program it does so and then becomes another program; a tie outlives that. It loads nothing
heavy, for every process of a server starts through it.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG, _PR_GET_PDEATHSIG = 1, 2
EXIT_START_ERROR = 2


def die_with_parent(parent: int, number: signal.Signals = signal.SIGKILL) -> None:
    """Get ``number`` from the kernel when ``parent`` dies; leave now if it is dead already.

    Call it in the child, for a tie to be there before anything else is. Only Linux has such ties.
    """
    if sys.platform != "linux":
        return
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, int(number), 0, 0, 0) != 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    if os.getppid() != parent:
        os._exit(1)


def dies_with_parent() -> bool:
    """Whether this process was started by one of ours that it dies with."""
    if sys.platform != "linux":
        return False
    number = ctypes.c_int()
    ctypes.CDLL(None).prctl(_PR_GET_PDEATHSIG, ctypes.byref(number), 0, 0, 0)
    return number.value != 0


def main(words: list[str]) -> None:
    """``PARENT COMMAND...``: become COMMAND, tied to PARENT."""
    parent, *argv = words
    die_with_parent(int(parent))
    try:
        os.execvp(argv[0], argv)
    except OSError as error:
        print(f"cannot start {argv[0]}: {error.strerror}", file=sys.stderr)
        sys.exit(EXIT_START_ERROR)


if __name__ == "__main__":
    main(sys.argv[1:])
