"""The request plane must work on both event loops; everything else runs on asyncio's own."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping

import pytest
import uvloop


def pytest_asyncio_loop_factories(
    item: pytest.Item,
) -> Mapping[str, Callable[[], asyncio.AbstractEventLoop]]:
    factories: dict[str, Callable[[], asyncio.AbstractEventLoop]]
    factories = {"asyncio": asyncio.new_event_loop}
    if item.path.name == "test_requests.py":
        factories["uvloop"] = uvloop.new_event_loop
    return factories


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """NIXL's connections and reads fail now and then on a busy machine, as a ticket that is lost,
    which a pipeline tries again; so does a test of them, and its summary names it (RERUN)."""
    for item in items:
        if "nixl" in item.nodeid and item.path.parent.name == "contract":
            item.add_marker(pytest.mark.flaky(reruns=3))
