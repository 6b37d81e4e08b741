"""The same request gives the same tokens in every pattern, and in plain transformers.

All in one process; real ones with several workers of a role: ``test_patterns``, ``test_drain``.
"""

import asyncio
from dataclasses import dataclass
from functools import cache

import pytest
from tools import tiny

from support.one_process import serving_in_one_process
from support.requests64 import TOKENS, ask_all, mixed, same_words, stock_answers, stock_prompts

FAMILIES = ["qwen2_5_vl", "llava"]
PATTERNS = ["EPD", "E/PD", "E/P/D", "EP/D", "E*2/PD", "E/P*2/D*2"]
# Small steps, so that most prompts go in chunks.
FLAGS = ["--enable-multimodal", "--torch-step-tokens=96"]
# Little more than the longest request needs, in small blocks: some sequences are preempted.
FEW = ("--torch-block-size=2", "--torch-kv-blocks=450")
ENOUGH = ("--torch-kv-blocks=2000",)  # one round takes about 1,000

pytestmark = pytest.mark.timeout(600)


@dataclass(frozen=True)
class Answers:
    rounds: list[list[dict]]  # of the sixty-four, twice
    varied: list[dict]  # of the same words with one picture after the other
    preemptions: float


@cache
def answers(family, pattern, blocks=FEW):
    """Two rounds against a fresh server: the second one finds prefixes that are still cached."""
    flags = [*FLAGS, *blocks]
    with serving_in_one_process(
        str(tiny.ensure_checkpoint(family)), "--pattern", pattern, *flags
    ) as server:
        model = server.model
        *rounds, varied = [
            asyncio.run(ask_all(server.url, model, requests))
            for requests in (mixed(), mixed(), same_words())
        ]
        settled = lambda: all(  # noqa: E731
            w["kv_blocks_free"] == w["kv_blocks_total"] and not w["tickets"]
            for w in server.cluster().values()
        )
        server.wait(settled, what="every block and ticket is given back")
        workers = server.cluster().values()
        preemptions = sum(worker["counters"].get("preemptions", 0) for worker in workers)
    return Answers(rounds, varied, preemptions)


def ids(answer):
    return answer["choices"][0]["token_ids"]


def logprobs(answer):
    return [token["logprob"] for token in answer["choices"][0]["logprobs"]["content"]]


@cache
def stock_of(family):
    folded = answers(family, "EPD").rounds[0]
    return stock_answers(tiny.ensure_checkpoint(family), [ids(answer) for answer in folded])


@pytest.mark.parametrize(
    ("family", "pattern"),
    [*(("qwen2_5_vl", pattern) for pattern in PATTERNS), ("llava", "EPD"), ("llava", "E/P/D")],
)
def test_tokens_equal_transformers_and_each_other(family, pattern):
    folder = tiny.ensure_checkpoint(family)
    prompts, stock = stock_prompts(folder), stock_of(family)
    folded = answers(family, "EPD").rounds[0]
    for got in answers(family, pattern).rounds:
        for one, prompt, want, same, answer in zip(
            mixed(), prompts, stock, folded, got, strict=True
        ):
            assert tuple(answer["prompt_token_ids"]) == prompt
            if one.greedy:
                assert ids(answer) == want.ids
                assert logprobs(answer) == pytest.approx(want.logprobs, abs=1e-4)
            else:
                assert ids(answer) == ids(same)
                assert logprobs(answer) == pytest.approx(logprobs(same), abs=1e-4)
            assert len(ids(answer)) == TOKENS


@pytest.mark.parametrize("family", FAMILIES)
def test_the_second_round_hits_the_prefix_cache(family):
    def cached(round_):
        return sum(a["usage"]["prompt_tokens_details"]["cached_tokens"] for a in round_)

    first, second = answers(family, "EPD", ENOUGH).rounds
    assert [ids(answer) for answer in second] == [ids(answer) for answer in first]
    assert cached(second) > cached(first)
    assert cached(second) > 0.5 * sum(a["usage"]["prompt_tokens"] for a in second)


@pytest.mark.parametrize("family", FAMILIES)
def test_some_sequences_were_preempted(family):
    """Else the comparison above would not show that they go on as if nothing had been."""
    assert sum(answers(family, pattern).preemptions for pattern in ("EPD", "E/P/D")) > 0


@pytest.mark.parametrize("family", FAMILIES)
def test_the_pictures_matter(family):
    """The same words with other pictures give other tokens: the comparison above can fail."""
    varied = answers(family, "EPD").varied
    assert len({answer["usage"]["prompt_tokens"] for answer in varied}) == 1
    assert len({tuple(ids(answer)) for answer in varied}) == len(varied)
