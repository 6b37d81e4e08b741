"""Takes the file system away from a process, but for folders that it may read.

Also TCP, signals to processes outside and looking into them, as far as the kernel knows how.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import stat
import struct
from collections.abc import Iterable

_CREATE, _ADD, _RESTRICT = 444, 445, 446  # on every architecture
_WHICH_VERSION = 1
_PATH_BENEATH = 1
_READ_FILE, _READ_FOLDER = 1 << 2, 1 << 3


def _call(number: int, *words: int | bytes | None) -> int:
    libc = ctypes.CDLL(None, use_errno=True)
    result: int = libc.syscall(number, *words)
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    return result


def _taken(version: int, *, tcp_left: bool) -> bytes:
    """Everything that a kernel of this version can take away. ``tcp_left``: but TCP."""
    files = (1 << (13 if version < 2 else 14 if version < 3 else 15 if version < 5 else 16)) - 1
    tcp, scopes = 0 if tcp_left else 3, 3  # bind and connect; abstract sockets and signals
    if version < 4:
        return struct.pack("Q", files)
    return struct.pack("QQ", files, tcp) + (struct.pack("Q", scopes) if version >= 6 else b"")


def install_landlock(readable: Iterable[str], *, tcp_left: bool = False) -> None:
    """Leave this process, for ever, only these folders and files, to read. OSError: not here.

    ``tcp_left``: and TCP connections. The process must have given up new privileges before.
    """
    taken = _taken(_call(_CREATE, None, 0, _WHICH_VERSION), tcp_left=tcp_left)
    rules = _call(_CREATE, taken, len(taken), 0)
    try:
        for path in readable:
            with contextlib.suppress(FileNotFoundError, NotADirectoryError, PermissionError):
                _allow(rules, path)
        _call(_RESTRICT, rules, 0)
    finally:
        os.close(rules)


def _allow(rules: int, path: str) -> None:
    fd = os.open(path, os.O_PATH | os.O_CLOEXEC)
    try:
        folder = stat.S_ISDIR(os.fstat(fd).st_mode)
        rights = _READ_FILE | (_READ_FOLDER if folder else 0)
        _call(_ADD, rules, _PATH_BENEATH, struct.pack("=Qi", rights, fd), 0)
    finally:
        os.close(fd)
