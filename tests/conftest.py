"""What holds for every test."""

from __future__ import annotations

import logging
import os
import signal
from collections.abc import Iterator

import pytest

# Under nohup it is ignored, by every process below too; some tests stop servers with it.
signal.signal(signal.SIGHUP, signal.SIG_DFL)
# Tiny models gain nothing from a second thread, and on a busy machine the threads of each operation
# wait for each other. Read when torch is imported.
os.environ.setdefault("OMP_NUM_THREADS", "1")

SLOW_FIRST = ("integration", "e2e", "contract")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """With several processes, tests of one file share one, and its servers are started once.

    A file whose tests share a server for each family is divided by family. Files with servers come
    first, so that no process is left alone with a long one.
    """
    for item in items:
        params = getattr(item, "callspec", None)
        family = (
            params.params.get("family") if params and "integration" in item.path.parts else None
        )
        name = f"{item.path.parent.name}/{item.path.stem}"
        item.add_marker(pytest.mark.xdist_group(f"{name}-{family}" if family else name))
    items.sort(key=lambda item: not {*SLOW_FIRST} & {*item.path.parts})


@pytest.fixture(autouse=True)
def _logging_as_before() -> Iterator[None]:
    """Code under test may configure logging for its process, which is that of all other tests."""
    root, ours = logging.getLogger(), logging.getLogger("triptych")
    before = root.handlers[:], root.level, ours.level
    yield
    root.handlers[:] = before[0]
    root.setLevel(before[1])
    ours.setLevel(before[2])
