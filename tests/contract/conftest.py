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
    if item.path.name in ("test_requests.py", "test_tls.py"):
        factories["uvloop"] = uvloop.new_event_loop
    return factories
