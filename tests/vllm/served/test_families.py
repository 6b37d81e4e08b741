"""Other families behind real vLLM, against plain transformers; and the demo's right answers.

Clips are left out: words after them stand elsewhere in vLLM (see test_patterns).
"""

import asyncio
from pathlib import Path

import pytest
from tools import tiny

from models.demo import frozen
from models.demo.asking import CHECKPOINT
from models.demo.asking import ask_all as ask_demo
from support import families
from support.asking import ask_all, ids, logprobs
from support.servers import serving

FLAGS = ("--engine=vllm", "--enable-multimodal", "--kv-cache-bytes=134217728")
START = 300.0
SAMPLES = Path(__file__).parents[2] / "demo_samples"

pytestmark = pytest.mark.timeout(900)


@pytest.mark.parametrize(
    ("family", "kinds", "pattern"),
    [
        ("qwen2_vl", ("image",), "E/PD"),
        ("qwen3_vl", ("image",), "E/P/D"),  # whose prefill needs vLLM's tower to be there
        ("qwen2_5_omni", ("image", "audio"), "E/P/D"),
    ],
)
def test_tokens_equal_transformers(family, kinds, pattern):
    asked = families.mixed(family, only=kinds)
    assert any(len(one.media) > 1 for one in asked)
    flags = (f"--pattern={pattern}", *FLAGS)
    with serving(str(tiny.ensure_checkpoint(family)), *flags, start_seconds=START) as server:
        bodies = [one.body for one in asked]
        answers = asyncio.run(ask_all(server.url, server.model, bodies))
    for one, answer in zip(asked, answers, strict=True):
        want = families.expected(family, one, answer["prompt_token_ids"])
        assert ids(answer) == want.ids
        assert logprobs(answer) == pytest.approx(want.logprobs, abs=2e-4)


def test_the_demo_answers_rightly():
    """Samples that the torch engine answers rightly, pictures, clips and sounds."""
    asked = frozen.read(SAMPLES)
    flags = ("--pattern=E/P/D", *FLAGS)
    with serving(str(CHECKPOINT), *flags, start_seconds=START) as server:
        answers = asyncio.run(ask_demo(server.url, asked, 16))
    wrong = [
        one.task for one, got in zip(asked, answers, strict=True) if not one.turn.right(got.text)
    ]
    assert wrong == []
