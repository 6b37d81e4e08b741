"""Starts processes clean, and locks them down: resource limits, no privileges, no file system but
folders that they may read.

Decoding processes also get a filter of system calls (``seccomp``). A hostile file that takes over
its decoder can then still use up its share of CPU time and memory and answer nonsense, and little
more. Knows nothing of media.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import resource
import socket
import stat
import struct
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import triptych
from triptych.media import seccomp

# Event loops come first. Not more than that: beside an engine whose processes spin while they wait,
# a decoder would hardly run.
NICENESS = 4
DESCRIPTORS = 64
OOM_SCORE_ADJ = 500  # of 1000: when memory runs out, the kernel kills a decoder before a server

_PR_SET_NO_NEW_PRIVS = 38
_CAPABILITIES = struct.pack("Ii", 0x20080522, 0)  # version 3 of that call; this process
_SYSTEM = (  # what the interpreter and compiled libraries read when they load
    "/usr",
    "/lib",
    "/lib64",
    "/etc/ld.so.cache",
    "/proc/self",
    "/proc/cpuinfo",
    "/proc/meminfo",
    "/proc/stat",
    "/sys/devices/system",
    "/dev/null",
    "/dev/urandom",
)

# Landlock's system calls, with the same numbers on every architecture, and its flags.
_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446
_GET_VERSION = 1
_PATH_BENEATH = 1
_READ_FILE, _READ_FOLDER = 1 << 2, 1 << 3


def spawn_clean(
    module: str, sock: socket.socket, environment: dict[str, str], *, quiet: bool = False
) -> subprocess.Popen[bytes]:
    """Start ``python -m module SOCKET PARENT`` with no descriptor but standard ones and its socket.

    It gets this environment, not ours, which holds secrets; and our search path, so that it finds
    the same code. ``quiet``: its errors go nowhere. Raises OSError.
    """
    number = sock.fileno()
    return subprocess.Popen(
        # -P and -s add nothing to the search path.
        [sys.executable, "-s", "-P", "-m", module, str(number), str(os.getpid())],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL if quiet else None,
        pass_fds=(number,),
        cwd="/",
        env=environment | {"PYTHONPATH": os.pathsep.join(import_folders()), "PYTHONUTF8": "1"},
        # Ctrl-C goes to us; the process ends when we do. Not a session of its own: Linux divides
        # cores among sessions, and a process alone in one waited for seconds on busy cores.
        process_group=0,
    )


def import_folders() -> tuple[str, ...]:
    """The module search path, without the working folder and the folder of our script."""
    own = str(Path(triptych.__file__).parent.parent)
    incidental = {str(Path.cwd()), str(Path(sys.argv[0]).absolute().parent)}
    found = (path for path in sys.path if Path(path).is_absolute() and path not in incidental)
    return tuple(dict.fromkeys((own, *found)))


def limit_resources(memory: int) -> None:
    """Bound what a decoding process uses up. The pool bounds its time, anew for each item."""
    os.nice(NICENESS)
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
        file.write(str(OOM_SCORE_ADJ))
    # Not the address space: libraries map far more than they use.
    lower_limit(resource.RLIMIT_DATA, memory)
    lower_limit(resource.RLIMIT_NOFILE, DESCRIPTORS)
    lower_limit(resource.RLIMIT_FSIZE, 0)
    lower_limit(resource.RLIMIT_CORE, 0)
    lower_limit(resource.RLIMIT_MEMLOCK, 0)
    lower_limit(resource.RLIMIT_MSGQUEUE, 0)


def lock_down() -> tuple[str, ...]:
    """Take files, sockets, programs and other processes away from a decoding process.

    It may still read folders of code, which may be loaded later. Returns the names of the locks
    that this kernel does not offer.
    """
    lacking = drop_privileges()
    if "no_new_privs" in lacking:
        return ("no_new_privs", "landlock", "seccomp")
    try:
        install_landlock([*_SYSTEM, *code_folders()])
    except OSError as error:
        lacking.append(f"landlock ({error.strerror})")
    try:
        seccomp.install_seccomp()
    except OSError as error:
        lacking.append(f"seccomp ({error.strerror})")
        # The next best: no new process. That forbids threads too, and does not bind root.
        lower_limit(resource.RLIMIT_NPROC, 0)
    return tuple(lacking)


def code_folders() -> list[str]:
    """Where this process imports code from."""
    return [sys.prefix, sys.base_prefix, *filter(None, sys.path)]


def drop_privileges() -> list[str]:
    """Give up new privileges and capabilities, for ever. Returns what the kernel refused."""
    libc = ctypes.CDLL(None, use_errno=True)
    lacking = []
    if libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) != 0:
        lacking.append("no_new_privs")
    if libc.capset(_CAPABILITIES, bytes(24)) != 0:  # what root may do and others may not
        lacking.append("capset")
    return lacking


def lower_limit(what: int, most: int) -> None:
    """Set a resource limit, soft and hard, or keep the hard limit where that is lower."""
    _, hard = resource.getrlimit(what)
    if hard != resource.RLIM_INFINITY:
        most = min(most, hard)
    resource.setrlimit(what, (most, most))


def has_memory_left() -> bool:
    """Whether this process can still allocate nearly all the memory that it may have.

    To be asked after an allocation failed. True: it asked for more than its limit. False: the
    machine has no memory left.
    """
    most, _ = resource.getrlimit(resource.RLIMIT_DATA)
    if most == resource.RLIM_INFINITY:
        return False
    with open("/proc/self/status") as file:
        used = next(int(line.split()[1]) << 10 for line in file if line.startswith("VmData:"))
    left = (most - used) // 8 * 7
    return left <= 0 or can_allocate(left)


def can_allocate(size: int) -> bool:
    """Whether the limit and the machine allow so many bytes of memory now."""
    try:
        mmap.mmap(-1, size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS).close()
    except OSError:
        return False
    return True


def install_landlock(readable: Iterable[str], *, keep_tcp: bool = False) -> None:
    """Leave this process, for ever, nothing of the file system but these paths, to be read.

    Also takes away TCP (unless ``keep_tcp``), signals to processes outside and tracing them, as far
    as the kernel's version of Landlock can. Call ``drop_privileges`` before. Raises OSError where
    the kernel has no Landlock.
    """
    handled = _handled_rights(landlock_version(), keep_tcp=keep_tcp)
    ruleset = _landlock(_CREATE_RULESET, handled, len(handled), 0)
    try:
        for path in readable:
            with contextlib.suppress(FileNotFoundError, NotADirectoryError, PermissionError):
                _allow_reading(ruleset, path)
        _landlock(_RESTRICT_SELF, ruleset, 0)
    finally:
        os.close(ruleset)


def landlock_version() -> int:
    """Of the kernel's Landlock. Raises OSError where there is none."""
    return _landlock(_CREATE_RULESET, None, 0, _GET_VERSION)


def _landlock(number: int, *arguments: int | bytes | None) -> int:
    libc = ctypes.CDLL(None, use_errno=True)
    result: int = libc.syscall(number, *arguments)
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    return result


def _handled_rights(version: int, *, keep_tcp: bool) -> bytes:
    """Everything that a kernel of this version can take away."""
    files = (1 << (13 if version < 2 else 14 if version < 3 else 15 if version < 5 else 16)) - 1
    tcp, scopes = 0 if keep_tcp else 3, 3  # bind and connect; abstract sockets and signals
    if version < 4:
        return struct.pack("Q", files)
    return struct.pack("QQ", files, tcp) + (struct.pack("Q", scopes) if version >= 6 else b"")


def _allow_reading(ruleset: int, path: str) -> None:
    fd = os.open(path, os.O_PATH | os.O_CLOEXEC)
    try:
        folder = stat.S_ISDIR(os.fstat(fd).st_mode)
        rights = _READ_FILE | (_READ_FOLDER if folder else 0)
        _landlock(_ADD_RULE, ruleset, _PATH_BENEATH, struct.pack("=Qi", rights, fd), 0)
    finally:
        os.close(fd)
