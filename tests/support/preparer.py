"""Stands in for ``triptych.media.prepare`` in a decoding process: does what the item's bytes say.

An item is JSON: the name of a deed here, then its arguments. What the deed gives comes back as JSON
in a uint8 array. It loads nothing heavy before it must, so a process starts fast.
"""

from __future__ import annotations

import ctypes
import errno
import hashlib
import importlib
import json
import mmap
import os
import resource
import signal
import socket
import threading
import time
import types
from pathlib import Path

from triptych.errors import AudioTooLong, InvalidMedia
from triptych.media import lockdown
from triptych.messages import MediaMeta

DEEDS = {}
_kept = []
_mismatchs = []  # errors that a self-test is to raise
_libc = ctypes.CDLL(None, use_errno=True)


def load_libraries(recipes):
    """Nothing, so that a process starts fast; but that it was asked is recorded."""
    _kept.append(recipes.revision)


def prepare(kind, form, data, recipes, limits, allow_torch, options=None):
    name, *words = json.loads(bytes(data))
    given = DEEDS[name](*words)
    import numpy as np

    if name != "arrays":
        given = [np.frombuffer(json.dumps(given).encode(), np.uint8)]
    meta = MediaMeta(hashlib.sha256(data).digest(), 1, (1, 2), kind)
    return meta, given, 1, form == "embeds"


def self_test(kind, form, recipes, limits):
    """Fails as what a deed did last has failed, unless that was the fault of its file."""
    if _mismatchs:
        raise _mismatchs.pop()


def deed(function):
    DEEDS[function.__name__] = function
    return function


def tried(attempt):
    """The name of the error that an attempt ends in, or "allowed"."""
    try:
        attempt()
    except OSError as error:
        return errno.errorcode[error.errno]
    except (RuntimeError, ValueError):  # how threads and limits say it
        return "EPERM"
    return "allowed"


def called(number, *words):
    if _libc.syscall(number, *words) < 0:
        raise OSError(ctypes.get_errno(), "")


@deed
def arrays(*wanted):
    """(dtype, shape, value) of each."""
    import numpy as np

    return [np.full(shape, value, dtype) for dtype, shape, value in wanted]


@deed
def loaded():
    """The revisions of the recipes that were loaded."""
    return [word for word in _kept if isinstance(word, str)]


@deed
def echo(value):
    return value


@deed
def loads(name):
    """Whether a module can be imported."""
    try:
        importlib.import_module(name)
    except ImportError:
        return False
    return True


@deed
def sleep(seconds, value=None):
    time.sleep(seconds)
    return value


@deed
def refuse(message):
    raise AudioTooLong(message)


@deed
def refuse_otherwise():
    error = InvalidMedia("made up")
    error.code, error.status = "no_workers", 503
    raise error


@deed
def die(how):
    if how == "abort":
        os.abort()
    elif how == "segfault":
        ctypes.string_at(0)
    elif how == "exit":
        os._exit(3)
    elif how == "bug":
        raise LookupError("/a/path at 0xdeadbeef")
    elif how == "memory":
        raise MemoryError
    elif how == "kill":
        os.kill(os.getpid(), signal.SIGKILL)


@deed
def mismatch(how):
    """As where a library is of another version than our code is written for."""
    _mismatchs.append(TypeError())
    if how == "numpy":
        import numpy as np

        np.full(object(), 1)
    raise {error.__name__: error for error in (TypeError, AttributeError, ImportError)}[how]


@deed
def type_error():
    """As a file brings it about: the next one is decoded."""
    raise TypeError


@deed
def no_memory_left():
    """From now on the machine has none for this process."""

    def full(*words):
        raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))

    lockdown.mmap = types.SimpleNamespace(**vars(mmap) | {"mmap": full})


@deed
def keep_memory():
    """From now on hold on to the memory that results go into, to change them later."""
    import __main__

    __main__._copy = lambda array, memory, offset: _kept.extend(
        mmap.mmap(int(fd), 0) for fd in os.listdir("/proc/self/fd") if "memfd" in _link(fd)
    )


@deed
def burn(seconds):
    """Of CPU time."""
    end = time.process_time() + seconds
    while time.process_time() < end:
        pass


@deed
def allocate(size):
    return len(bytearray(size))


@deed
def about():
    return {
        "pid": os.getpid(),
        "environment": dict(os.environ),
        "descriptors": {fd: _link(fd) for fd in os.listdir("/proc/self/fd")},
        "folder": os.getcwd(),
        "niceness": os.getpriority(os.PRIO_PROCESS, 0),
        "status": Path("/proc/self/status").read_text(),
        "killed_first": Path("/proc/self/oom_score_adj").read_text().strip(),
        "core": resource.getrlimit(resource.RLIMIT_CORE),
    }


def _link(fd):
    try:
        return os.readlink(f"/proc/self/fd/{fd}")
    except OSError:
        return ""  # the one that lists


@deed
def descriptors():
    opened = []
    try:
        while len(opened) < 10_000:
            opened.append(os.open("/dev/null", os.O_RDONLY))
    except OSError as error:
        return [len(opened), errno.errorcode[error.errno]]
    finally:
        for fd in opened:
            os.close(fd)
    return [len(opened), ""]


@deed
def break_out(folder):
    """Everything that the sandbox should prevent, and how it ended."""
    own = os.path.join(folder, "own")
    parent = os.getppid()
    return {
        "tcp socket": tried(lambda: socket.socket(socket.AF_INET)),
        "udp socket": tried(lambda: socket.socket(socket.AF_INET6, socket.SOCK_DGRAM)),
        "unix socket": tried(lambda: socket.socket(socket.AF_UNIX)),
        "socket pair": tried(socket.socketpair),
        "program": tried(lambda: os.execv("/bin/true", ["true"])),
        "spawn": tried(lambda: os.posix_spawn("/bin/true", ["true"], {})),
        "fork": tried(os.fork),
        "thread": tried(threading.Thread(target=int).start),
        "new file": tried(lambda: os.open(own + "2", os.O_CREAT | os.O_WRONLY)),
        "write file": tried(lambda: os.open(own, os.O_WRONLY)),
        "truncate file": tried(lambda: os.truncate(own, 0)),
        "remove file": tried(lambda: os.unlink(own)),
        "rename file": tried(lambda: os.rename(own, own + "3")),
        "link file": tried(lambda: os.symlink(own, own + "4")),
        "change mode": tried(lambda: os.chmod(own, 0o777)),
        "new folder": tried(lambda: os.mkdir(own + "5")),
        "read file": tried(lambda: os.open(own, os.O_RDONLY)),
        "read passwords": tried(lambda: os.open("/etc/passwd", os.O_RDONLY)),
        "list files": tried(lambda: os.listdir(folder)),
        "parent's environment": tried(lambda: os.open(f"/proc/{parent}/environ", os.O_RDONLY)),
        "parent's memory": tried(lambda: os.open(f"/proc/{parent}/mem", os.O_RDONLY)),
        "signal": tried(lambda: os.kill(parent, 0)),
        "signal to all": tried(lambda: os.kill(-1, 0)),
        "limits": tried(lambda: resource.setrlimit(resource.RLIMIT_CORE, (0, 0))),
        "parent's limits": tried(
            lambda: resource.prlimit(parent, resource.RLIMIT_CORE, (0, 0)),
        ),
        "shared memory": tried(lambda: mmap.mmap(-1, 4096)),
        "anonymous file": tried(lambda: os.memfd_create("x")),
        "niceness": tried(lambda: os.setpriority(os.PRIO_PROCESS, 0, 0)),
        "pipe": tried(os.pipe),
    }


@deed
def break_out_by_number():
    """The same by number, for calls that Python has no name for. Of x86_64."""
    parent = os.getppid()
    word = ctypes.create_string_buffer(64)
    return {
        "ptrace": tried(lambda: called(101, 16, parent, 0, 0)),
        "read another's memory": tried(lambda: called(310, parent, word, 1, word, 1, 0)),
        "io_uring": tried(lambda: called(425, 8, word)),
        "bpf": tried(lambda: called(321, 0, word, 64)),
        "userfaultfd": tried(lambda: called(323, 0)),
        "perf": tried(lambda: called(298, word, 0, -1, -1, 0)),
        "keys": tried(lambda: called(250, 0, -3, 0)),
        "unshare": tried(lambda: called(272, 0x10000000)),
        "mount": tried(lambda: called(165, 0, word, 0, 0, 0)),
        "pidfd": tried(lambda: called(434, parent, 0)),
        "x32": tried(lambda: called(0x40000000 | 39)),
        "owner of a descriptor": tried(lambda: called(72, 0, 8, parent)),
    }
