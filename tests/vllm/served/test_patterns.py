"""Real vLLM behind a real server, in every pattern: the tokens of plain vLLM, and of transformers.

Sixteen requests at once, several media items in some, then the same again from the caches, then
with embeddings instead of files. Plain vLLM is fed with the media by its own processors, and
Triptych with files by its own: the prompts must expand alike, and the tokens be the same.

One family runs in every pattern and each other in one: starting vLLM is what takes the time.
``TRIPTYCH_ALL_PATTERNS=1`` runs them all.
"""

import asyncio
import os
from dataclasses import dataclass
from functools import cache
from ipaddress import ip_address

import pytest
from tools import tiny

from support import families
from support.asking import ask_all, ids, logprobs
from support.listening import listened_at
from support.plain_vllm import measured, requests
from support.servers import serving

FAMILIES = ["qwen2_5_vl", "llava", "llava_next_video", "qwen2_audio"]
PATTERNS = ["EPD", "E/PD", "E/P/D", "EP/D"]
NATIVE = ["qwen2_5_vl", "qwen2_audio"]  # of a picture's tower and a sound's
ALL = bool(os.environ.get("TRIPTYCH_ALL_PATTERNS"))
CHOICE = {"llava": "E/PD", "llava_next_video": "EP/D", "qwen2_audio": "E/P/D"}
ARRANGED = [
    (family, (pattern,))
    for family in FAMILIES
    for pattern in PATTERNS
    if ALL or CHOICE.get(family, pattern) == pattern
]
ARRANGED += [(family, ("E/PD", "--encoder=native")) for family in NATIVE[: None if ALL else 1]]
FLAGS = ("--engine=vllm", "--enable-multimodal", "--kv-cache-bytes=134217728")

# Where vLLM and transformers 5 do not agree: words after a clip go on from its last moment in vLLM,
# and from its larger side in transformers.
OTHERWISE = {("qwen2_5_vl", "video")}
START = 300.0  # seconds: two of them on two cores, and vLLM is slow to start

pytestmark = pytest.mark.timeout(900)


@dataclass(frozen=True)
class Answers:
    first: list[dict]
    again: list[dict]
    embedded: list[dict]
    cold: dict[str, dict]  # workers' own reports after the first round
    warm: dict[str, dict]
    varied: dict[str, list[dict]]
    listening: set[str]  # addresses of all workers and of whatever they have started


@cache
def answers(family, pattern, *flags):
    asked = requests(family)
    files = [one.body for one in asked]
    embedded = [one.embedded(family).body for one in asked]
    folder = str(tiny.ensure_checkpoint(family))
    with serving(folder, f"--pattern={pattern}", *FLAGS, *flags, start_seconds=START) as server:
        model = server.model

        def ask(bodies):
            return asyncio.run(ask_all(server.url, model, bodies))

        first, cold = ask(files), server.cluster()
        again, warm = ask(files), server.cluster()
        rest = [] if "--encoder=native" in flags else ask(embedded)
        varied = {
            kind: ask([one.body for one in same])
            for kind, same in families.same_words(family).items()
            if kind in kinds(family)
        }
        listening = listened_at(worker["pid"] for worker in server.cluster().values())
        settled = lambda: all(  # noqa: E731
            w["kv_blocks_free"] == w["kv_blocks_total"]
            and not w["tickets"] + w["segments"] + w["queued"] + w["running"]
            for w in server.cluster().values()
        )
        server.wait(settled, what="every block, ticket and segment is given back")
    return Answers(first, again, rest, cold, warm, varied, listening)


def arranged(*patterns):
    """The families and patterns, of those that run, whose pattern is one of these."""
    return [(f, p[0]) for f, p in ARRANGED if p[0] in patterns and len(p) == 1]


def kinds(family):
    return {shown.kind for one in requests(family) for shown in one.media}


def compare(family, got):
    for asked, want, answer in zip(requests(family), measured(family), got, strict=True):
        assert answer["prompt_token_ids"] == want.prompt
        assert ids(answer) == want.ids
        assert logprobs(answer) == pytest.approx(want.logprobs, abs=2e-4)
        if any((family, shown.kind) in OTHERWISE for shown in asked.media):
            continue
        stock = families.expected(family, asked, want.prompt)
        assert ids(answer) == stock.ids
        assert logprobs(answer) == pytest.approx(stock.logprobs, abs=2e-4)


@pytest.mark.parametrize(
    ("family", "pattern"), ARRANGED, ids=[" ".join([f, *p]) for f, p in ARRANGED]
)
def test_tokens_are_those_of_plain_vllm(family, pattern):
    got = answers(family, *pattern)
    compare(family, got.first)
    compare(family, got.again)
    if got.embedded:
        compare(family, got.embedded)
    assert got.listening
    assert all(ip_address(address).is_loopback for address in got.listening)


@pytest.mark.parametrize(("family", "pattern"), arranged(*PATTERNS))
def test_the_media_matter(family, pattern):
    """The same words with other media give other tokens: the comparison above can fail."""
    for kind, varied in answers(family, pattern).varied.items():
        assert len({answer["usage"]["prompt_tokens"] for answer in varied}) == 1, kind
        assert len({tuple(ids(answer)) for answer in varied}) == len(varied), kind


@pytest.mark.parametrize("family", [family for family, _ in arranged("EPD")])
def test_known_blocks_are_reported_as_cached(family):
    """vLLM keeps whole blocks of 32 tokens; the second time, all of a prompt's but the last."""
    for answer in answers(family, "EPD").again:
        told = answer["usage"]
        whole = (told["prompt_tokens"] - 1) // 32 * 32
        assert told["prompt_tokens_details"]["cached_tokens"] == whole


@pytest.mark.parametrize(("family", "pattern"), arranged("E/P/D", "EP/D"))
def test_decode_computes_no_prompt(family, pattern):
    """Blocks that came by the connector are what it goes on from: of each prompt it computes one
    token, and the media were never there."""
    got = answers(family, pattern)
    decode = got.cold["D-0"]["counters"]
    assert decode["transferred_tokens"] > 0
    prompts = sum(len(one.prompt) for one in measured(family))
    assert decode["transferred_tokens"] >= prompts - 33 * len(measured(family))
    assert got.cold["D-0"]["bytes_received"]["shm"] < 100_000, "notes, and no embeddings"
    assert got.cold["D-0"]["parameters"]["encoder"] == 0


@pytest.mark.parametrize(("family", "pattern"), arranged("E/PD", "E/P/D"))
def test_prefill_has_no_tower(family, pattern):
    """The embeddings came from the encoder: no other worker has the weights or the pixels."""
    got = answers(family, pattern).cold
    role = "PD-0" if pattern == "E/PD" else "P-0"
    assert got[role]["parameters"]["encoder"] == 0
    assert got["E-0"]["parameters"]["language"] == 0
    assert got["E-0"]["parameters"]["encoder"] > 0
    assert got[role]["bytes_received"]["shm"] > 0
    assert got["E-0"]["bytes_sent"]["shm"] >= got[role]["bytes_received"]["shm"]
