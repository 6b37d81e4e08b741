"""A stream goes on in another worker after what the first one made, as if it had never stopped."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from contract.engines.panels import Answer, Panel, Panels, split

pytestmark = pytest.mark.asyncio(loop_scope="session")
TOKENS = 40  # over a block, so that cuts fall within one, at its edge and beyond
CUTS = (1, 15, 16, 33, TOKENS - 1)
ASKED = (
    {"temperature": 0.0},
    {"temperature": 1.0, "seed": 5},
    {"temperature": 1.0, "seed": 6, "frequency_penalty": 1.5, "repetition_penalty": 1.3},
    {
        "temperature": 1.0,
        "seed": 7,
        "allowed_token_ids": tuple(range(100, 120)),
        "bad_words": ((101,), (102, 103), (104, 105, 106)),
        "stop_token_ids": (107, 108),
        "min_tokens": TOKENS,
    },
)


async def resuming(panels: Panels, role: str) -> Panel:
    panel = await panels.get(role)
    if not panel.loaded.resumes:
        pytest.skip(f"{panels.name} begins again from the prompt")
    return panel


def follows(answer: Answer, whole: Answer, cut: int) -> None:
    assert answer.ids == whole.ids[cut:]
    assert answer.finish == whole.finish
    for entry, like in zip(answer.logprobs, whole.logprobs[cut:], strict=True):
        assert entry.logprob == pytest.approx(like.logprob, abs=1e-3)


@pytest.mark.parametrize("sampling", ASKED, ids=["greedy", "seeded", "penalties", "restricted"])
async def test_what_follows_is_what_would_have_followed(panels: Panels, sampling):
    """In one worker and in two. Off: the tokens made are no part of what prefill computes."""
    whole = await resuming(panels, "EPD")
    prompt = panels.prompt(21, 30, pictures=1)
    seen = await whole.see(4)
    work = panels.work(prompt, max_tokens=TOKENS, logprobs=1, **sampling)
    undisturbed = await whole.answer(work, seen)
    for cut in CUTS:  # with another's cache, and with none
        made = tuple(undisturbed.ids[:cut])
        for salt in ("", f"{sampling} {cut}"):
            rest = replace(work, generated=made, salt=salt)
            follows(await whole.answer(rest, seen), undisturbed, cut)
    prefill, decode = await panels.get("EP"), await panels.get("D")
    seen = await prefill.see(4)
    for cut in CUTS:
        rest = replace(work, generated=tuple(undisturbed.ids[:cut]))
        follows(await split(prefill, decode, rest, seen), undisturbed, cut)


async def test_generated_tokens_count_as_prompt_where_they_are_prefilled(panels: Panels):
    """It may be found in the cache too: else more is found there than was asked for."""
    whole = await resuming(panels, "EPD")
    work = panels.work(panels.prompt(22, 30, pictures=0), max_tokens=TOKENS, temperature=0.0)
    undisturbed = await whole.answer(work)
    before = whole.loaded.report().counters
    await whole.answer(replace(work, generated=tuple(undisturbed.ids[:-1])))
    after = whole.loaded.report().counters
    prompt, cached = (after[n] - before[n] for n in ("prompt_tokens", "cached_tokens"))
    assert prompt == undisturbed.prompt.tokens + TOKENS - 1
    assert undisturbed.prompt.tokens < cached < prompt
