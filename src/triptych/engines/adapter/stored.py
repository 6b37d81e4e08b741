"""How large the parts of a checkpoint are, for engines that do not tell themselves: a tensor may be
packed away, or be in several processes."""

from __future__ import annotations

import math

from safetensors import safe_open

from triptych.checkpoint import Model
from triptych.messages import ParameterCounts
from triptych.models.family import Family


def checkpoint_sizes(family: Family, model: Model) -> ParameterCounts:
    """Parameters of towers and language model; reads headers only."""
    counts = {"encoder": 0, "language": 0}
    for file in sorted(model.folder.glob("*.safetensors")):
        with safe_open(file, framework="pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118 (it is no mapping)
                if (target := family.weight_name(name)) is not None:
                    counts[target[0]] += math.prod(tensors.get_slice(name).get_shape())
    return ParameterCounts(**counts)
