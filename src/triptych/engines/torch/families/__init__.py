"""The model families that the torch engine serves, by ``model_type``; imported when chosen."""

from __future__ import annotations

import importlib

from triptych.engines.torch.family import Family
from triptych.errors import UnsupportedModel
from triptych.model import Model

FAMILIES = {
    "llava": "triptych.engines.torch.families.llava",
    "qwen2_5_vl": "triptych.engines.torch.families.qwen2_5_vl",
}


def find(model: Model) -> Family:
    """The family of a checkpoint. Its module names its class ``FAMILY``."""
    if model.family not in FAMILIES:
        raise UnsupportedModel(
            f"model_type '{model.family}' of {model.name} is not supported; "
            f"there are {', '.join(sorted(FAMILIES))}"
        )
    family: Family = importlib.import_module(FAMILIES[model.family]).FAMILY(model)
    return family
