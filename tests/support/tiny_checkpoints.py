from __future__ import annotations

from pathlib import Path

import pytest
from tools import tiny

from triptych.checkpoint import Model, open_model

FAMILIES = ("llava", "qwen2_vl", "qwen2_5_vl", "qwen3_vl")


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("tiny")
    return {family: tiny.make_checkpoint(family, folder / family) for family in FAMILIES}


@pytest.fixture(params=FAMILIES)
def model(request: pytest.FixtureRequest, checkpoints: dict[str, Path]) -> Model:
    """A tiny checkpoint of each family in turn."""
    return open_model(checkpoints[request.param])
