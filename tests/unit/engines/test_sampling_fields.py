"""A new field of ``Sampling`` fails here until every engine applies, ignores or refuses it."""

from __future__ import annotations

import ast
from pathlib import Path

import msgspec
import pytest

import triptych
from triptych.engines.adapter.base import SamplingTable
from triptych.engines.fake.engine import IGNORED_SAMPLING
from triptych.engines.sglang.requests import SGLANG_SAMPLING
from triptych.engines.trtllm.requests import TRT_SAMPLING
from triptych.engines.vllm.requests import VLLM_SAMPLING
from triptych.messages import Sampling

FIELDS = [field.name for field in msgspec.structs.fields(Sampling)]
ENGINES = Path(triptych.__file__).parent / "engines"


@pytest.mark.parametrize(
    "table", [VLLM_SAMPLING, SGLANG_SAMPLING, TRT_SAMPLING], ids=["vllm", "sglang", "trtllm"]
)
def test_every_field_has_an_entry_in_the_table_of_an_adapter(table: SamplingTable):
    assert sorted(table) == sorted(FIELDS)


@pytest.mark.parametrize(("engine", "ignored"), [("torch", set()), ("fake", IGNORED_SAMPLING)])
def test_our_own_engines_read_every_field(engine: str, ignored: set[str]):
    """As an attribute of ``sampling`` (or ``s``), in the engine's folder or in ``checks``."""
    files = [ENGINES / "checks.py", *(ENGINES / engine).rglob("*.py")]
    read = {field for file in files for field in fields_read(file)}
    assert set(FIELDS) - read == ignored


def fields_read(file: Path) -> set[str]:
    return {
        node.attr
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.Attribute)
        and (ast.unparse(node.value) == "s" or ast.unparse(node.value).endswith("sampling"))
    }
