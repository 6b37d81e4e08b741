"""The filter of system calls, judged by a machine of our own: that of either architecture."""

import os
import struct

import pytest

from triptych.media import seccomp

READ, WRITE_ONLY, CREATE = 0, os.O_WRONLY, os.O_CREAT
ALLOW, DENY, KILL, UNKNOWN = 0x7FFF0000, 0x00050001, 0x80000000, 0x00050026
CALLS = {
    "read": ((0, 63), [0, 0, 0], ALLOW),
    "socket": ((41, 198), [2, 1, 0], DENY),
    "connect": ((42, 203), [3, 0, 0], DENY),
    "sendmsg": ((46, 211), [3, 0, 0], DENY),
    "sendto": ((44, 206), [3, 0, 0, 0, 0], ALLOW),
    "sendto elsewhere": ((44, 206), [3, 0, 0, 0, 1 << 32], DENY),
    "execve": ((59, 221), [0, 0, 0], DENY),
    "execveat": ((322, 281), [0, 0, 0], DENY),
    "clone": ((56, 220), [0x3D0F00], DENY),
    "ptrace": ((101, 117), [0], DENY),
    "openat": ((257, 56), [0, 0, READ], ALLOW),
    "openat to write": ((257, 56), [0, 0, WRITE_ONLY], DENY),
    "openat to create": ((257, 56), [0, 0, READ | CREATE], DENY),
    "openat2": ((437, 437), [0, 0, 0], UNKNOWN),
    "memfd_create": ((319, 279), [0, 0], DENY),
    "ftruncate": ((77, 46), [3, 0], DENY),
    "mmap": ((9, 222), [0, 4096, 3, 0x22], ALLOW),
    "mmap of a file": ((9, 222), [0, 4096, 3, 0x01], ALLOW),
    "mmap shared": ((9, 222), [0, 4096, 3, 0x21], DENY),
    "kill": ((62, 129), [os.getpid(), 6], ALLOW),
    "kill another": ((62, 129), [1, 9], DENY),
    "tgkill": ((234, 131), [os.getpid(), 5, 6], ALLOW),
    "prlimit": ((302, 261), [0, 7, 0], ALLOW),
    "prlimit to set": ((302, 261), [0, 7, 1 << 40], DENY),
    "F_GETFL": ((72, 25), [3, 3, 0], ALLOW),
    "F_SETOWN": ((72, 25), [3, 8, 1], DENY),
}


def judge(program, architecture, number, arguments):
    data = struct.pack("<iIQ6Q", number, architecture, 0, *arguments, *[0] * (6 - len(arguments)))
    steps = list(struct.iter_unpack("<HBBI", program))
    at = accumulator = 0
    while True:
        code, yes, no, operand = steps[at]
        at += 1
        if code == 0x20:
            (accumulator,) = struct.unpack_from("<I", data, operand)
        elif code == 0x54:
            accumulator &= operand
        elif code == 0x06:
            return operand
        else:
            test = {
                0x15: accumulator == operand,
                0x35: accumulator >= operand,
                0x45: bool(accumulator & operand),
            }
            at += yes if test[code] else no


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize(
    ("machine", "column", "architecture"), [("x86_64", 0, 0xC000003E), ("aarch64", 1, 0xC00000B7)]
)
def test_the_filter_of_each_architecture(machine, column, architecture, call):
    numbers, arguments, verdict = CALLS[call]
    program = seccomp.filter_program(machine)
    assert judge(program, architecture, numbers[column], arguments) == verdict
    assert judge(program, 0x40000003, numbers[column], arguments) == KILL


def test_the_filter_knows_one_interface_only():
    assert judge(seccomp.filter_program("x86_64"), 0xC000003E, 0x40000000, []) == DENY
