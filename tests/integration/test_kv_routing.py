"""Routing by KV cache between real processes: the same tokens, from where they are cached."""

import itertools
import time

import pytest

from support.servers import image_part, serving, text_part

FAKE = ("--engine=fake", "--enable-multimodal")
WORDS = "what is to be seen in the picture beside the old town and above the lake "
SECONDS = 30.0


def talk(server, picture, turns=4):
    """One conversation; gives texts, and usage of each turn."""
    messages, said = [], []
    for turn in range(turns):
        parts = [text_part(f"{turn}: {WORDS * 3}?")]
        if not turn:
            parts.insert(0, image_part(picture))
        messages.append({"role": "user", "content": parts})
        body = {"model": server.model, "messages": messages, "max_tokens": 24, "temperature": 0}
        answer = server.request("/v1/chat/completions", body).json
        text = answer["choices"][0]["message"]["content"]
        messages.append({"role": "assistant", "content": text})
        said.append((text, answer["usage"]))
        told(server)
    return said


def routing(server):
    return server.state()["frontend"]["routing"]


def told(server):
    """Until the frontend knows what its workers hold."""
    deadline = time.monotonic() + SECONDS
    while True:
        cluster = server.state()
        held = sum(worker["counters"].get("kv_blocks_reported", 0) for worker in cluster["workers"])
        known = cluster["frontend"]["routing"].get("indexed_blocks", held)
        if held == known:
            return
        assert time.monotonic() < deadline, (held, known)
        time.sleep(0.02)


@pytest.fixture(scope="module")
def plain():
    """What everybody must answer."""
    with serving(*FAKE, "--pattern=EPD") as server:
        yield {picture: talk(server, picture) for picture in (b"sea", b"hill", b"town")}


def test_a_conversation_stays_where_its_cache_is(plain):
    """Proved by ``--routing=round-robin``: turns find what is two turns old, or nothing."""
    with serving(*FAKE, "--pattern=EPD*3", "--routing=kv") as server:
        for picture, expected in plain.items():
            said = talk(server, picture)
            assert [text for text, _ in said] == [text for text, _ in expected]
            for (_, before), (_, usage) in itertools.pairwise(said):
                cached = usage["prompt_tokens_details"]["cached_tokens"]
                assert cached >= before["prompt_tokens"] // 16 * 16
        found = routing(server)
        assert found["by"] == "kv"
        assert found["matched_blocks"] > found["blocks"] / 2
        assert found["changes_missed"] == 0


@pytest.mark.parametrize("pattern", ["E/P/D*2", "EP/D*2"])
def test_a_decode_worker_that_prefills_gives_the_same_tokens(plain, pattern):
    """Proved by ``--max-local-prefill=0``: P is asked every time."""
    with serving(
        *FAKE, f"--pattern={pattern}", "--routing=kv", "--max-local-prefill=256"
    ) as server:
        for picture, expected in plain.items():
            said = talk(server, picture)
            assert [text for text, _ in said] == [text for text, _ in expected]
        assert routing(server)["decode_only"] == 3 * len(plain)  # all but the first turns
