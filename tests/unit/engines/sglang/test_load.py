"""What is refused before SGLang is even imported."""

from __future__ import annotations

import pytest

from triptych.checkpoint import packaged_folder
from triptych.config import Config
from triptych.engines.sglang import load
from triptych.errors import InvalidConfig, UnsupportedModel
from triptych.topology import Role


def start(**settings: object) -> None:
    load.load(Config(**settings), Role("EPD"), lambda *_: None, lambda *_: None)


def test_a_model_whose_media_sglang_would_not_take_is_refused():
    with pytest.raises(UnsupportedModel, match="qwen2_5_vl"):
        start(model=str(packaged_folder("triptych-demo")))


def test_encoders_of_sglangs_own_are_refused():
    with pytest.raises(InvalidConfig, match="--encoder torch"):
        start(model=str(packaged_folder("triptych-demo")), encoder="native")
