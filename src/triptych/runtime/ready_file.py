"""A file that is there while a process takes requests: what a container's probe can look at."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path

from triptych.errors import InvalidConfig


@contextlib.contextmanager
def shown_by(path: str) -> Iterator[Callable[[], None]]:
    """Gives what makes the file. It is gone before, though a killed process left one, and after.

    Without a path nothing is made.
    """
    file = Path(path) if path else None
    if file is None:
        yield lambda: None
        return
    try:
        file.unlink(missing_ok=True)
        file.touch()  # refused now, not after minutes of loading
        file.unlink()
    except OSError as error:
        raise InvalidConfig(f"--ready-file {path} cannot be made: {error.strerror}") from None
    try:
        yield file.touch
    finally:
        file.unlink(missing_ok=True)
