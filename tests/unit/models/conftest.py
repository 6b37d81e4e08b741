"""Fixtures with tiny checkpoints, made and loaded once for all tests of a process."""

from collections.abc import Callable
from functools import cache

import pytest
from tools import tiny

from support.mixed import Mixed
from support.tiny_checkpoints import checkpoints, model

__all__ = ["benches", "checkpoints", "model"]


@pytest.fixture(scope="session")
def benches(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Mixed]:
    """The tiny checkpoint of a family by its model type. Tests leave it as it is."""
    folder = tmp_path_factory.mktemp("families")
    return cache(lambda family: Mixed(tiny.make_checkpoint(family, folder / family)))
