"""The run directory, where the processes of one server find each other.

A temporary one is locked while its server lives. A server that is killed leaves its directory
behind without a lock, and the next server removes it.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import stat
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from triptych.errors import InvalidConfig

RUN_DIR_PREFIX = "triptych-run-"
YOUNG_SECONDS = 60.0  # a newer directory may not be locked yet
RECORD_BYTES = 4096  # a block: more than a worker's record needs


@contextlib.contextmanager
def use(named: str) -> Iterator[Path]:
    """The named directory; without a name, a temporary one for the scope."""
    if named:
        path = create(named)
        _require_writable(path)
        yield path
        return
    _sweep()
    try:
        path = Path(tempfile.mkdtemp(prefix=RUN_DIR_PREFIX))
    except OSError as error:
        raise _unusable(tempfile.gettempdir(), error.strerror) from None
    lock = os.open(path, os.O_RDONLY)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        _require_writable(path)
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)
        os.close(lock)


def create(named: str) -> Path:
    """Create the directory that the operator named, and check that it can be used."""
    path = Path(named)
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise _unusable(named, error.strerror) from None
    if not os.access(path, os.R_OK | os.W_OK | os.X_OK):
        raise _unusable(named, "this user may not write to it")
    return path


@contextlib.contextmanager
def lock(path: Path, name: str) -> Iterator[None]:
    """A lock by name between processes; a process that is killed releases it."""
    lock = os.open(path / f"{name}.lock", os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
    finally:
        fcntl.flock(lock, fcntl.LOCK_UN)  # a forked child may still have the file open
        os.close(lock)


def check_writable(path: Path) -> None:
    """Raise OSError if a worker cannot write its record here: the disk may be full or broken."""
    with tempfile.TemporaryFile(dir=path) as file:
        file.write(bytes(RECORD_BYTES))
        file.flush()


def _require_writable(path: Path) -> None:
    try:
        check_writable(path)
    except OSError as error:
        raise _unusable(str(path), error.strerror) from None


def _unusable(path: str, why: str | None) -> InvalidConfig:
    return InvalidConfig(f"{path} cannot be used: {why}. Name another with --run-dir.")


def _sweep() -> None:
    """Remove the directories that killed servers of this user left behind."""
    for path in Path(tempfile.gettempdir()).glob(f"{RUN_DIR_PREFIX}*"):
        with contextlib.suppress(OSError):  # another server removes it too, or it is another user's
            held = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            try:
                _sweep_one(path, held)
            finally:
                os.close(held)


def _sweep_one(path: Path, held: int) -> None:
    about = os.fstat(held)
    private = about.st_uid == os.geteuid() and not stat.S_IMODE(about.st_mode) & 0o077
    if not private or time.time() - about.st_mtime < YOUNG_SECONDS:
        return
    fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)  # raises OSError while its server lives
    shutil.rmtree(path, ignore_errors=True)
