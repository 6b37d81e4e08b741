"""The model families that the torch engine serves, by ``model_type``; imported when chosen.

What is served is known without torch: ``check`` may be asked anywhere.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from triptych.errors import UnsupportedModel
from triptych.model import Model

if TYPE_CHECKING:
    from triptych.engines.torch.family import Family

FAMILIES = {
    "llava": "triptych.engines.torch.families.llava",
    "qwen2_5_vl": "triptych.engines.torch.families.qwen2_5_vl",
}


def check(model: Model) -> None:
    if model.family not in FAMILIES:
        raise UnsupportedModel(
            f"model_type '{model.family}' of {model.name} is not supported; "
            f"there are {', '.join(sorted(FAMILIES))}"
        )


def find(model: Model) -> Family:
    """The family of a checkpoint. Its module names its class ``FAMILY``."""
    check(model)
    family: Family = importlib.import_module(FAMILIES[model.family]).FAMILY(model)
    return family
