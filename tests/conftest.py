"""What holds for every test."""

from __future__ import annotations

import logging
import signal
from collections.abc import Iterator

import pytest

# Under nohup it is ignored, by every process below too; some tests stop servers with it.
signal.signal(signal.SIGHUP, signal.SIG_DFL)


@pytest.fixture(autouse=True)
def _logging_as_before() -> Iterator[None]:
    """Code under test may configure logging for its process, which is that of all other tests."""
    root, ours = logging.getLogger(), logging.getLogger("triptych")
    before = root.handlers[:], root.level, ours.level
    yield
    root.handlers[:] = before[0]
    root.setLevel(before[1])
    ours.setLevel(before[2])
