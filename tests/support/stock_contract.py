"""What every family must show beside plain transformers, for a bench and its expected answers."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest

import reference
from support.mixed import Mixed
from support.torch_engine import settled, split, whole

Answered = tuple[Any, Any, reference.Reference]  # prompt, media items, what transformers answers


async def check_tokens_and_logprobs(
    bench: Mixed, answered: Sequence[Answered], tolerance: float, **settings: Any
) -> None:
    """All at once in one engine: the tokens and logprobs of transformers, and no block is left."""
    with bench.engine(**settings) as engine:
        works = [bench.ask(prompt, items, logprobs=1) for prompt, items, _ in answered]
        answers = await asyncio.gather(*[whole(engine, *work) for work in works])
        for answer, (_, _, expected) in zip(answers, answered, strict=True):
            assert answer.ids == expected.ids
            found = [value.logprob for value in answer.logprobs]
            assert found == pytest.approx(expected.logprobs, abs=tolerance)
        assert await settled(engine)


async def check_prefill_and_decode_apart(bench: Mixed, answered: Sequence[Answered]) -> None:
    """The same tokens when one engine prefills and another decodes."""
    with bench.engine() as one, bench.engine() as two:
        works = [bench.ask(prompt, items) for prompt, items, _ in answered]
        answers = await asyncio.gather(*[split(one, two, *work) for work in works])
    assert [answer.ids for answer in answers] == [expected.ids for _, _, expected in answered]
