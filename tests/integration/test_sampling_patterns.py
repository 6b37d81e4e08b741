"""Fields that bound what is sampled give the same tokens in every pattern, with pictures too.

All in one process; beside plain transformers: ``unit/engines/torch/test_restrictions``.
"""

import asyncio
import itertools
import json
from functools import cache

import aiohttp
import pytest
from PIL import Image
from tools import tiny

from support.one_process import serving_in_one_process
from support.requests64 import png
from support.servers import image_part, text_part

PATTERNS = ["EPD", "E/PD", "E/P/D", "EP/D"]
ALLOWED = list(range(100, 140))
RESTRICTED = {
    "max_tokens": 24,
    "min_tokens": 20,
    "allowed_token_ids": ALLOWED,
    "stop_token_ids": [102, 103, 104, 105, 106],
    "bad_words": ["a", "ab"],
    "return_token_ids": True,
}
pytestmark = pytest.mark.timeout(300)


def chats(model):
    """Greedy and seeded, with a picture and without, with and without what bounds them."""
    picture = image_part(png(Image.new("RGB", (56, 84), (200, 30, 30))))
    for content, fields in itertools.product(
        ([text_part("Which colour?")], [picture, text_part("Which colour?")]),
        (
            {"temperature": 0} | RESTRICTED,
            {"temperature": 1.0, "seed": -5} | RESTRICTED,
            {"temperature": 1.0, "seed": 6, "max_tokens": 8, "return_token_ids": True},
            {"temperature": 0, "max_tokens": 2, "prompt_logprobs": 1, "return_token_ids": True},
        ),
    ):
        yield {"model": model, "messages": [{"role": "user", "content": content}]} | fields


@cache
def answers(pattern):
    folder = str(tiny.ensure_checkpoint("qwen2_5_vl"))
    flags = ["--enable-multimodal", "--torch-step-tokens=32", "--torch-kv-blocks=400"]
    with serving_in_one_process(folder, "--pattern", pattern, *flags) as server:
        return asyncio.run(ask(server.url, server.model))


async def ask(url, model):
    """All at once, twice: the second time the prompts are in the prefix cache."""
    echo = {"model": model, "prompt": "Once upon a time", "echo": True, "logprobs": 1}
    asked = [("chat/completions", body) for body in chats(model)]
    asked += [("completions", echo | {"max_tokens": 3, "temperature": 0})]
    async with aiohttp.ClientSession() as session:

        async def one(path, body):
            async with session.post(f"{url}/v1/{path}", json=body) as reply:
                answer = await reply.json()
                assert reply.status == 200, answer
                return answer

        return [await asyncio.gather(*[one(*each) for each in asked]) for _ in range(2)]


def ids(answer):
    return answer["choices"][0].get("token_ids")


def ranked(answer):
    """The log-probabilities of a prompt, as numbers in order."""
    shown = answer.get("prompt_logprobs") or []
    return [found["logprob"] for one in shown[1:] for _, found in sorted(one.items())]


@pytest.mark.parametrize("pattern", PATTERNS)
def test_every_pattern_gives_the_same(pattern):
    expected, _ = answers("EPD")
    for found in answers(pattern):
        for one, same in zip(found, expected, strict=True):
            assert ids(one) == ids(same)
            assert ranked(one) == pytest.approx(ranked(same), abs=1e-4)
            assert one["choices"][0]["finish_reason"] == same["choices"][0]["finish_reason"]
        echo, wanted = (each[-1]["choices"][0] for each in (found, expected))
        assert echo["text"] == wanted["text"]
        assert echo["logprobs"]["tokens"] == wanted["logprobs"]["tokens"]
        scores = [each["logprobs"]["token_logprobs"][1:] for each in (echo, wanted)]
        assert scores[0] == pytest.approx(scores[1], abs=1e-4)


def test_what_bounds_them_holds():
    found, _ = answers("EPD")
    bounded = [found[at] for at in (0, 1, 4, 5)]
    assert len({json.dumps(ids(answer)) for answer in bounded}) == 4
    for answer in bounded:
        made = ids(answer)
        assert set(made) <= set(ALLOWED)
        assert len(made) >= 20
        assert not set(made[:20]) & set(RESTRICTED["stop_token_ids"])


def test_logprobs_of_the_prompt_cover_all_of_it():
    for answer in (answers("EPD")[0][at] for at in (3, 7)):
        assert len(answer["prompt_logprobs"]) == answer["usage"]["prompt_tokens"]
        assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    echo = answers("EPD")[0][-1]
    assert echo["choices"][0]["text"].startswith("Once upon a time")
    tokens = echo["usage"]["prompt_tokens"] + echo["usage"]["completion_tokens"]
    assert len(echo["choices"][0]["logprobs"]["token_logprobs"]) == tokens
