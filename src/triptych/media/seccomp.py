"""A filter of system calls: a list of those that a locked down process may still make.

Every other call fails with EPERM. The process may open files for reading; it cannot get a socket,
start a program, a process or a thread, signal other processes, share memory or change its limits.
For x86_64 and aarch64, little-endian.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import platform
import struct

_LOAD, _AND, _RETURN = 0x20, 0x54, 0x06
_EQUAL, _NOT_BELOW, _ANY_BIT = 0x15, 0x35, 0x45
_ALLOW, _KILL = 0x7FFF0000, 0x80000000
_DENY = 0x00050000 | errno.EPERM
_UNKNOWN = 0x00050000 | errno.ENOSYS  # libraries fall back to the older call, which can be checked

_X32 = 0x40000000  # call numbers of another interface to the same kernel
_ARCHITECTURES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}
_SECCOMP = (317, 277)
_SET_MODE_FILTER, _ALL_THREADS = 1, 1

# Allowed with any arguments. Numbers on x86_64 and aarch64; None: there is no such call.
_ALLOWED: dict[str, tuple[int, int | None]] = {
    "access": (21, None),
    "arch_prctl": (158, None),
    "brk": (12, 214),
    "clock_getres": (229, 114),
    "clock_gettime": (228, 113),
    "clock_nanosleep": (230, 115),
    "close": (3, 57),
    "close_range": (436, 436),
    "dup": (32, 23),
    "dup2": (33, None),
    "dup3": (292, 24),
    "exit": (60, 93),
    "exit_group": (231, 94),
    "faccessat": (269, 48),
    "faccessat2": (439, 439),
    "fadvise64": (221, 223),
    "fstat": (5, 80),
    "fstatfs": (138, 44),
    "futex": (202, 98),
    "get_mempolicy": (239, 236),
    "get_robust_list": (274, 100),
    "getcpu": (309, 168),
    "getcwd": (79, 17),
    "getdents": (78, None),
    "getdents64": (217, 61),
    "getegid": (108, 177),
    "geteuid": (107, 175),
    "getgid": (104, 176),
    "getpid": (39, 172),
    "getppid": (110, 173),
    "getpriority": (140, 141),
    "getrandom": (318, 278),
    "getrlimit": (97, 163),
    "getrusage": (98, 165),
    "gettid": (186, 178),
    "gettimeofday": (96, 169),
    "getuid": (102, 174),
    "lseek": (8, 62),
    "lstat": (6, None),
    "madvise": (28, 233),
    "membarrier": (324, 283),
    "mincore": (27, 232),
    "mprotect": (10, 226),
    "mremap": (25, 216),
    "munmap": (11, 215),
    "nanosleep": (35, 101),
    "newfstatat": (262, 79),
    "poll": (7, None),
    "ppoll": (271, 73),
    "pread64": (17, 67),
    "preadv": (295, 69),
    "pselect6": (270, 72),
    "read": (0, 63),
    "readlink": (89, None),
    "readlinkat": (267, 78),
    "readv": (19, 65),
    "recvfrom": (45, 207),
    "recvmsg": (47, 212),
    "restart_syscall": (219, 128),
    "rseq": (334, 293),
    "rt_sigaction": (13, 134),
    "rt_sigprocmask": (14, 135),
    "rt_sigreturn": (15, 139),
    "sched_get_priority_max": (146, 125),
    "sched_get_priority_min": (147, 126),
    "sched_getaffinity": (204, 123),
    "sched_getparam": (143, 121),
    "sched_getscheduler": (145, 120),
    "sched_yield": (24, 124),
    "select": (23, None),
    "set_robust_list": (273, 99),
    "set_tid_address": (218, 96),
    "sigaltstack": (131, 132),
    "stat": (4, None),
    "statfs": (137, 43),
    "statx": (332, 291),
    "sysinfo": (99, 179),
    "time": (201, None),
    "times": (100, 153),
    "uname": (63, 160),
    "write": (1, 64),
    "writev": (20, 66),
}

_Program = list[tuple[int, int, int, int]]  # operation, steps if true, steps if false, operand


def _low(argument: int) -> tuple[int, int, int, int]:
    return (_LOAD, 0, 0, 16 + 8 * argument)


def _one_of(argument: int, *values: int) -> _Program:
    code = [_low(argument)]
    for value in values:
        code += [(_EQUAL, 0, 1, value), (_RETURN, 0, 0, _ALLOW)]
    return [*code, (_RETURN, 0, 0, _DENY)]


def _without(argument: int, bits: int) -> _Program:
    test = (_ANY_BIT, 1, 0, bits)
    return [_low(argument), test, (_RETURN, 0, 0, _ALLOW), (_RETURN, 0, 0, _DENY)]


def _not_all(argument: int, bits: int) -> _Program:
    return [
        _low(argument),
        (_AND, 0, 0, bits),
        (_EQUAL, 1, 0, bits),
        (_RETURN, 0, 0, _ALLOW),
        (_RETURN, 0, 0, _DENY),
    ]


def _null(argument: int) -> _Program:
    return [
        _low(argument),
        (_EQUAL, 0, 3, 0),
        (_LOAD, 0, 0, 16 + 8 * argument + 4),  # the high half
        (_EQUAL, 0, 1, 0),
        (_RETURN, 0, 0, _ALLOW),
        (_RETURN, 0, 0, _DENY),
    ]


def _conditional() -> dict[str, tuple[tuple[int, int | None], _Program]]:
    """Calls that are allowed with some arguments, or reported as unknown."""
    changing = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
    harmless = (
        fcntl.F_DUPFD,
        fcntl.F_DUPFD_CLOEXEC,
        fcntl.F_GETFD,
        fcntl.F_SETFD,
        fcntl.F_GETFL,
        fcntl.F_SETFL,
    )
    me = os.getpid()
    shared_anonymous = 0x21  # memory that RLIMIT_DATA does not count
    set_name, get_name, name_memory = 15, 16, 0x53564D41
    is_terminal, close_on_exec, without_blocking = 0x5401, 0x5451, 0x5421
    return {
        "open": ((2, None), _without(1, changing)),
        "openat": ((257, 56), _without(2, changing)),
        "openat2": ((437, 437), [(_RETURN, 0, 0, _UNKNOWN)]),
        "mmap": ((9, 222), _not_all(3, shared_anonymous)),
        "fcntl": ((72, 25), _one_of(1, *harmless)),
        "ioctl": ((16, 29), _one_of(1, is_terminal, close_on_exec, without_blocking)),
        "prctl": ((157, 167), _one_of(0, set_name, get_name, name_memory)),
        "prlimit64": ((302, 261), _null(2)),  # may read limits, not set them
        "sendto": ((44, 206), _null(4)),  # over a connected socket only
        "kill": ((62, 129), _one_of(0, me)),
        "tgkill": ((234, 131), _one_of(0, me)),
    }


def filter_program(machine: str) -> bytes:
    """The filter for this process on such a machine; KeyError for an unknown one."""
    column, architecture = _ARCHITECTURES[machine]
    code: _Program = [
        (_LOAD, 0, 0, 4),
        (_EQUAL, 1, 0, architecture),
        (_RETURN, 0, 0, _KILL),
        (_LOAD, 0, 0, 0),
        (_NOT_BELOW, 0, 1, _X32),
        (_RETURN, 0, 0, _DENY),
    ]
    for numbers in _ALLOWED.values():
        if (number := numbers[column]) is not None:
            code += [(_EQUAL, 0, 1, number), (_RETURN, 0, 0, _ALLOW)]
    for numbers, rule in _conditional().values():
        if (number := numbers[column]) is not None:
            code += [(_EQUAL, 0, len(rule), number), *rule]
    code.append((_RETURN, 0, 0, _DENY))
    return b"".join(struct.pack("<HBBI", *step) for step in code)


def install_seccomp() -> None:
    """Filter the calls of this process, for ever. Raises OSError where the kernel cannot.

    The process must have given up new privileges before (``lockdown.drop_privileges``).
    """
    machine = platform.machine()
    if machine not in _ARCHITECTURES or struct.calcsize("P") != 8:
        raise OSError(errno.ENOSYS, f"there is no filter for {machine}")
    steps = filter_program(machine)
    memory = ctypes.create_string_buffer(steps, len(steps))
    described = struct.pack("@HP", len(steps) // 8, ctypes.addressof(memory))
    libc = ctypes.CDLL(None, use_errno=True)
    number = _SECCOMP[_ARCHITECTURES[machine][0]]
    if libc.syscall(number, _SET_MODE_FILTER, _ALL_THREADS, described) != 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
