"""The directory where the processes of one server find each other: made, held and removed.

One that is made here is locked while its server lives. A server that was killed leaves its
directory behind without a lock, and the next one sweeps it.
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

PREFIX = "triptych-run-"
YOUNG_SECONDS = 60.0  # so new a directory may not be locked yet
RECORD_BYTES = 4096  # a block: more than a worker's record needs


@contextlib.contextmanager
def use(named: str) -> Iterator[Path]:
    """The named directory, which stays; or (none named) a new one, while the scope lasts."""
    if named:
        path = create(named)
        _demand_room(path)
        yield path
        return
    _sweep()
    try:
        path = Path(tempfile.mkdtemp(prefix=PREFIX))
    except OSError as error:
        raise _refusal(tempfile.gettempdir(), error.strerror) from None
    lock = os.open(path, os.O_RDONLY)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        _demand_room(path)
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)
        os.close(lock)


def create(named: str) -> Path:
    """A directory that the operator chose, ready for use."""
    path = Path(named)
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise _refusal(named, error.strerror) from None
    if not os.access(path, os.R_OK | os.W_OK | os.X_OK):
        raise _refusal(named, "it may not be written to")
    return path


@contextlib.contextmanager
def lock(path: Path, name: str) -> Iterator[None]:
    """One process at a time holds a name; one that is killed lets go of it."""
    lock = os.open(path / f"{name}.lock", os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
    finally:
        fcntl.flock(lock, fcntl.LOCK_UN)  # a child that was forked may still have it open
        os.close(lock)


def check_writable(path: Path) -> None:
    """Raise OSError unless a worker could write its record here: the disk may be full or broken."""
    with tempfile.TemporaryFile(dir=path) as file:
        file.write(bytes(RECORD_BYTES))
        file.flush()


def _demand_room(path: Path) -> None:
    try:
        check_writable(path)
    except OSError as error:
        raise _refusal(str(path), error.strerror) from None


def _refusal(path: str, why: str | None) -> InvalidConfig:
    return InvalidConfig(f"{path} cannot be used: {why}. Name another with --run-dir.")


def _sweep() -> None:
    """Remove what servers of this user left behind. Whatever lives, or is not ours, stays."""
    for path in Path(tempfile.gettempdir()).glob(f"{PREFIX}*"):
        with contextlib.suppress(OSError):  # another one sweeps too, or it is not ours to open
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
    fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)  # an OSError while its server lives
    shutil.rmtree(path, ignore_errors=True)
