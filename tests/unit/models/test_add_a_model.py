"""The family and the tiny checkpoint in docs/add-a-model.md work as they stand there."""

from __future__ import annotations

import asyncio
import re
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
from tools import tiny, tiny_builders

import reference
from support.pictures import draw
from support.torch_engine import Bench, prepared, whole
from triptych import models
from triptych.engines.torch import weights

PAGE = Path(__file__).parents[3] / "docs/add-a-model.md"


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Bench:
    family, entry, builder = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.S | re.M)
    module = ModuleType(f"{models.__name__}.vipllava")
    for code in (family, builder):
        exec(code, module.__dict__)  # our own document
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setitem(tiny_builders.BUILDERS, "vipllava", module.build_vipllava)
    [(name, found)] = eval(f"{{{entry}}}", vars(models)).items()
    monkeypatch.setitem(models.FAMILIES, name, found)
    return Bench(tiny.make_checkpoint("vipllava", tmp_path / "tiny"))


async def test_the_example_equals_stock(bench: Bench) -> None:
    shown = [draw(index) for index in range(3)]
    items = [prepared(bench.family.recipes.image, picture) for picture in shown]
    tower = weights.load_part(bench.family, bench.model, "encoder", "cpu", torch.float32)
    with torch.inference_mode():
        rows = bench.family.encode(tower, items)
    for mine, theirs in zip(rows, reference.image_features(bench.folder, shown), strict=True):
        assert torch.equal(mine, theirs)
    requests = bench.prompts(4, pictures=2)
    with bench.engine(step_tokens=24) as engine:
        calls = [whole(engine, *bench.work(r.prompt, r.pictures)) for r in requests]
        answers = await asyncio.gather(*calls)
    assert [a.ids for a in answers] == [bench.expected(r).ids for r in requests]
