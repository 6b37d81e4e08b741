"""What a checkpoint holds is told from its headers."""

from __future__ import annotations

import math

from safetensors import safe_open

from triptych import models
from triptych.checkpoint import open_model, packaged_folder
from triptych.engines.adapter.stored import checkpoint_sizes


def test_every_parameter_belongs_to_one_part():
    model = open_model(packaged_folder("triptych-demo"))
    with safe_open(model.folder / "model.safetensors", framework="pt") as file:
        shapes = [file.get_slice(name).get_shape() for name in file.keys()]  # noqa: SIM118
    parts = checkpoint_sizes(models.find_family(model), model)
    assert parts.encoder > 0
    assert parts.language > 0
    assert parts.encoder + parts.language == sum(math.prod(shape) for shape in shapes)
