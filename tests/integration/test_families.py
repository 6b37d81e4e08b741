"""Every family and every kind of media: the tokens of plain transformers, in every pattern.

Families are those of the registry: a new one needs no entry here. Most servers run in the process
of the tests; each family is served once by real processes too, and Omni in every pattern
(``test_demo_model``).

Thirty-two requests at once, then the same again from the caches, then with embeddings instead of
files. What the prompt expands to is held against stock processors in the unit tests; here the
expanded prompt of one pattern is what transformers continues, and all patterns must agree on it.
"""

import asyncio
from dataclasses import dataclass
from functools import cache

import aiohttp
import pytest
from tools import tiny
from tools.tiny_folder import tiny_families

from support import families
from support.one_process import serving_in_one_process
from support.servers import serving

FAMILIES = tiny_families()
PATTERNS = ["EPD", "E/PD", "E/P/D", "EP/D"]
DEMO = "qwen2_5_omni"  # which test_demo_model serves with real processes, in every pattern
REAL_PATTERN = {family: "EPD" for family in FAMILIES if family != DEMO} | {"qwen3_vl": "E/PD"}
CASES = [(family, pattern) for family in FAMILIES for pattern in PATTERNS]
# Small steps, so that most prompts go in chunks that cut through their media.
FLAGS = (
    "--enable-multimodal",
    "--torch-step-tokens=96",
    "--torch-kv-blocks=3000",
    "--decode-processes=1",
)
OFF = ("--cache-embeddings=0", "--cache-decoded=0", "--no-torch-prefix-cache")

pytestmark = pytest.mark.timeout(600)


@dataclass(frozen=True)
class Answers:
    first: list[dict]
    again: list[dict]
    embedded: list[dict]
    hits: list[float]  # of the embedding cache, after each round
    decoded: dict[str, float]  # items decoded, by process
    varied: dict[str, list[dict]]  # by kind: the same words with other media


async def ask_all(url, model, bodies):
    """All at once."""
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector) as session:

        async def ask(body):
            body = body | {"model": model}
            async with session.post(f"{url}/v1/chat/completions", json=body) as got:
                answer = await got.json()
                assert got.status == 200, answer
                return answer

        return await asyncio.gather(*map(ask, bodies))


@cache
def answers(family, pattern, *flags):
    asked = families.mixed(family)
    files = [one.body for one in asked]
    embedded = [one.embedded(family).body for one in asked]
    real = REAL_PATTERN.get(family) == pattern and not flags
    start = serving if real else serving_in_one_process
    with start(str(tiny.ensure_checkpoint(family)), "--pattern", pattern, *FLAGS, *flags) as server:
        rounds, hits = [], []
        for bodies in (files, files, embedded):
            rounds.append(asyncio.run(ask_all(server.url, server.model, bodies)))
            hits.append(
                sum(w["counters"].get("embedding_cache_hits", 0) for w in server.cluster().values())
            )
        state = server.state()
        decoded = {w["id"]: w["counters"].get("decoded_items", 0) for w in state["workers"]}
        decoded["frontend"] = state["frontend"]["media"].get("decoded_items", 0)
        varied = {
            kind: asyncio.run(ask_all(server.url, server.model, [one.body for one in same]))
            for kind, same in families.same_words(family).items()
        }
        settled = lambda: all(  # noqa: E731
            w["kv_blocks_free"] == w["kv_blocks_total"] and not w["tickets"] + w["segments"]
            for w in server.cluster().values()
        )
        server.wait(lambda: not server.state()["frontend"]["tickets"], what="no ticket is left")
        server.wait(settled, what="every block, ticket and segment is given back")
    return Answers(*rounds, hits, decoded, varied)


@cache
def stock(family):
    """What transformers answers to the prompts as the folded server expands them.

    It generates every eighth answer itself; of the others it gives its choice after each token.
    """
    return [
        families.expected(
            family, one, answer["prompt_token_ids"], () if number % 8 == 0 else ids(answer)
        )
        for number, (one, answer) in enumerate(
            zip(families.mixed(family), answers(family, "EPD").first, strict=True)
        )
    ]


def ids(answer):
    return answer["choices"][0]["token_ids"]


def logprobs(answer):
    return [token["logprob"] for token in answer["choices"][0]["logprobs"]["content"]]


def compare(family, got):
    folded = answers(family, "EPD").first
    for want, same, answer in zip(stock(family), folded, got, strict=True):
        assert answer["prompt_token_ids"] == same["prompt_token_ids"]
        assert ids(answer) == want.ids
        assert logprobs(answer) == pytest.approx(want.logprobs, abs=2e-4)
        assert len(ids(answer)) == families.TOKENS


@pytest.mark.parametrize(("family", "pattern"), CASES)
def test_tokens_equal_transformers_cold_cached_and_from_embeddings(family, pattern):
    got = answers(family, pattern)
    compare(family, got.first)
    compare(family, got.again)
    compare(family, got.embedded)
    items = sum(len(one.media) for one in families.mixed(family))
    cold, warm, _ = got.hits
    assert warm - cold == items, "the second round finds every item"


@pytest.mark.parametrize("family", ["qwen3_vl", "qwen2_5_omni"])
def test_tokens_equal_without_any_cache(family):
    """The first round above is cold but for items that come twice in it; here nothing is cached."""
    got = answers(family, "E/PD", *OFF)
    compare(family, got.first)
    compare(family, got.again)
    assert got.hits == [0, 0, 0]


@pytest.mark.parametrize(("family", "pattern"), [(DEMO, "EPD"), (DEMO, "E/P/D")])
def test_tokens_equal_when_media_are_decoded_beside_the_frontend(family, pattern):
    """Omni takes every kind there is."""
    got = answers(family, pattern, "--decode-at=frontend")
    for round_ in (got.first, got.again, got.embedded):
        compare(family, round_)
    assert got.decoded.pop("frontend") > len(families.SHOW)
    assert sum(got.decoded.values()) == 1, "encoders decode the canary's picture alone"


@pytest.mark.parametrize("family", FAMILIES)
def test_the_media_matter(family):
    """The same words with other media give other tokens: the comparison above can fail."""
    for kind, varied in answers(family, "EPD").varied.items():
        assert len({answer["usage"]["prompt_tokens"] for answer in varied}) == 1, kind
        assert len({tuple(ids(answer)) for answer in varied}) == len(varied), kind
