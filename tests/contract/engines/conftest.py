"""Which engines the suite is run on, and that all of them are at rest after every test.

By default those that run in our own environment. ``pytest tests/contract/engines --engine vllm``
names another, and that pytest is the one of its environment.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from contract.engines.kinds import KINDS, engine_processes
from contract.engines.panels import SECONDS, Panels

OURS = ("fake", "documented", "torch")


def pytest_addoption(parser: pytest.Parser) -> None:
    """Heard only when this folder is named on the command line."""
    parser.addoption("--engine", action="append", choices=sorted(KINDS))


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "one_engine" in metafunc.fixturenames:
        names = metafunc.config.getoption("--engine", None) or OURS
        metafunc.parametrize("one_engine", names, indirect=True, scope="session")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Some engines take minutes to load, and a test may load three."""
    for item in items:
        if "one_engine" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.timeout(1200))


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def one_engine(request: pytest.FixtureRequest) -> AsyncIterator[Panels]:
    """An engine's parts live on one event loop: all tests of it run on the same."""
    panels = Panels(request.param)
    yield panels
    await panels.close()
    deadline = time.monotonic() + SECONDS
    while left := engine_processes(request.param):
        assert time.monotonic() < deadline, left
        await asyncio.sleep(0.1)


@pytest_asyncio.fixture(loop_scope="session")
async def panels(one_engine: Panels) -> AsyncIterator[Panels]:
    yield one_engine
    await one_engine.rest()


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def reference() -> AsyncIterator[Panels]:
    """The built-in engine, which is held to plain transformers elsewhere."""
    panels = Panels("torch")
    yield panels
    await panels.close()
