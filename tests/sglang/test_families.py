"""Other families, against plain transformers."""

from __future__ import annotations

import pytest
from tools import tiny

from support import families
from support.sglang_cpu import served
from triptych.models import served_by

pytestmark = pytest.mark.timeout(1800)


CASES = [
    ("qwen2_audio", "audio", "EPD"),
    ("qwen2_audio", "audio", "E/PD"),
    ("qwen2_audio", "audio", "E/P/D"),
    ("qwen3_vl", "image", "E/PD"),
]
IN_TEST_PATTERNS = {"qwen2_5_vl"}
NOT_RUN = {"qwen2_vl"}  # see docs/engines.md


def test_every_family_of_the_registry_is_run_or_named():
    run = {family for family, _, _ in CASES}
    assert run | IN_TEST_PATTERNS | NOT_RUN == {*served_by("sglang")}


@pytest.mark.parametrize(("family", "kind", "pattern"), CASES)
def test_tokens_equal_transformers(family: str, kind: str, pattern: str):
    asked = [
        one
        for one in families.mixed(family)
        if one.media and all(shown.kind == kind for shown in one.media)
    ]
    assert any(len(one.media) > 1 for one in asked)
    with served(tiny.ensure_checkpoint(family), pattern) as server:
        for one in asked:
            answer = server.chat(one.turns, **one.body)
            assert answer.status == 200, answer.body
            [choice] = answer.json["choices"]
            expected = families.expected(family, one, answer.json["prompt_token_ids"])
            assert choice["token_ids"] == expected.ids
