"""Every pattern gives the tokens of SGLang in one piece, over HTTP, sixteen requests at once.

The measure is SGLang fed with the same media by its own processors: see ``support.sglang_measure``.
For words and pictures it is SGLang as it is published. For clips it is not: SGLang is patched to
know a clip's true rate (it takes all for 24 frames a second), and to encode each moment of a clip
by itself, as transformers and Triptych's encoder do. So these tests show that no pattern changes
what SGLang makes of a clip; they don't show that a clip gives the tokens of SGLang as published.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator, Sequence
from ipaddress import ip_address
from typing import Any

import aiohttp
import psutil
import pytest
from tools import tiny

from support import families
from support.families import Asked
from support.listening import listened_at
from support.servers import TestServer
from support.sglang_cpu import START_SECONDS, served
from support.sglang_measure import FAMILY, Measured, measured, requests

pytestmark = pytest.mark.timeout(1800)


@pytest.fixture(scope="module", params=["EPD", "E/PD", "E/P/D", "EP/D"])
def server(request: pytest.FixtureRequest) -> Iterator[TestServer]:
    with served(tiny.ensure_checkpoint(FAMILY), request.param) as server:
        yield server


async def ask_all(server: TestServer, asked: Sequence[Asked]) -> list[dict[str, Any]]:
    """All at once."""
    model = server.model
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector) as session:

        async def ask(one: Asked) -> dict[str, Any]:
            url, body = f"{server.url}/v1/chat/completions", one.body | {"model": model}
            async with session.post(url, json=body) as got:
                return {"status": got.status} | await got.json()

        return await asyncio.gather(*(ask(one) for one in asked))


def ids(answer: dict[str, Any]) -> list[int]:
    assert answer["status"] == 200, answer
    return answer["choices"][0]["token_ids"]


def equal(answers: Sequence[dict[str, Any]], expected: Sequence[Measured]) -> None:
    assert [ids(answer) for answer in answers] == [one.ids for one in expected]
    for answer, one in zip(answers, expected, strict=True):
        assert answer["usage"]["prompt_tokens"] == one.prompt
        tokens = answer["choices"][0]["logprobs"]["content"]
        assert [token["logprob"] for token in tokens] == pytest.approx(one.logprobs, abs=1e-4)


def settle(server: TestServer) -> dict[str, dict[str, Any]]:
    """Wait until every block and ticket was given back; the workers by id."""
    server.wait(
        lambda: all(
            w["kv_blocks_free"] == w["kv_blocks_total"]
            and not w["tickets"]
            and not w["queued"] + w["running"]
            for w in server.cluster().values()
        ),
        what="every block and ticket is given back",
    )
    return server.cluster()


def test_tokens_and_logprobs_equal_sglang_in_one_piece(server: TestServer):
    """Of clips: a patched SGLang, see above."""
    expected = measured()
    first, second = [asyncio.run(ask_all(server, requests())) for _ in range(2)]
    equal(first, expected)
    equal(second, expected)  # now from its prefix cache
    found = sum(a["usage"]["prompt_tokens_details"]["cached_tokens"] for a in second)
    assert found > 0.5 * sum(one.prompt for one in expected)
    settle(server)


def test_a_clients_embeddings_equal_files(server: TestServer):
    """There are no media files, only embeddings."""
    pairs = zip(requests(), measured(), strict=True)
    asked, expected = zip(*[pair for pair in pairs if pair[0].media], strict=True)
    answers = asyncio.run(ask_all(server, [one.embedded(FAMILY) for one in asked]))
    equal(answers, expected)
    settle(server)


@pytest.mark.parametrize("kind", ["image", "video"])
def test_the_media_matter(server: TestServer, kind: str):
    """The same words with other media give other tokens: the comparisons above can fail."""
    asked = families.same_words(FAMILY)[kind]
    answers = asyncio.run(ask_all(server, asked))
    assert len({answer["usage"]["prompt_tokens"] for answer in answers}) == 1
    assert len({tuple(ids(answer)) for answer in answers}) == len(answers)


def test_only_prefill_workers_compute_prompts(server: TestServer):
    """By SGLang's own count: decode has its KV cache from elsewhere, and never saw the media."""
    workers = settle(server)
    computed = {
        worker["role"]: worker["counters"]["computed_prompt_tokens"]
        for worker in workers.values()
        if worker["role"] != "E"
    }
    for role, tokens in computed.items():
        assert (tokens > 0) == ("P" in role), computed


def test_embeddings_and_files_go_together(server: TestServer):
    """Both are embeddings to SGLang, whose scheduler would die of a mixture."""
    shown = [families.image(1), families.image(2)]
    words = {"type": "text", "text": "Which?"}
    files, mixed = [
        server.chat([first, families.embeds_part(FAMILY, shown[1]), words], max_tokens=4)
        for first in (families.embeds_part(FAMILY, shown[0]), shown[0].part)
    ]
    assert files.status == mixed.status == 200, mixed.body
    assert files.json["choices"] == mixed.json["choices"]


def test_it_listens_on_this_host_only(server: TestServer):
    """Neither by workers nor by what SGLang starts below them: none of that asks who is there."""
    assert server.chat("Hello", max_tokens=2).status == 200  # so that all are connected
    for worker in workers(server):
        addresses = listened_at([worker["pid"]])
        assert addresses
        assert all(ip_address(address).is_loopback for address in addresses), worker["role"]


def test_a_client_that_leaves_frees_everything(server: TestServer):
    async def leave() -> None:
        body = requests()[0].body | {"model": server.model, "max_tokens": 2000, "stream": True}
        async with aiohttp.ClientSession() as session:
            url = f"{server.url}/v1/chat/completions"
            async with session.post(url, json=body) as got:
                assert got.status == 200
                await got.content.readany()

    asyncio.run(leave())
    settle(server)


def test_an_engine_that_dies_is_replaced():
    """Its requests get a clean 503, and the supervisor brings a worker back."""
    with served(tiny.ensure_checkpoint(FAMILY), "EPD") as server:
        [worker] = server.cluster().values()
        asked = requests()[0]
        body = asked.body | {"model": server.model, "max_tokens": 3000}

        async def under_load() -> list[int]:
            async with aiohttp.ClientSession() as session:
                url = f"{server.url}/v1/chat/completions"
                calls = [asyncio.ensure_future(session.post(url, json=body)) for _ in range(4)]
                await asyncio.to_thread(
                    server.wait, lambda: server.cluster()[worker["id"]]["running"] > 0
                )
                os.kill(scheduler_of(worker["pid"]), signal.SIGKILL)
                return [(await call).status for call in calls]

        assert asyncio.run(under_load()) == [503] * 4
        server.wait(
            lambda: server.complete() and all(w["pid"] != worker["pid"] for w in workers(server)),
            START_SECONDS,
            "another worker is ready",
        )
        [answer] = asyncio.run(ask_all(server, [asked]))
        equal([answer], measured()[:1])


def workers(server: TestServer) -> list[dict[str, Any]]:
    return list(server.cluster().values())


def scheduler_of(pid: int) -> int:
    """SGLang's process below a worker that is its engine."""
    [found] = [
        p.pid for p in psutil.Process(pid).children() if "scheduler" in " ".join(p.cmdline())
    ]
    return found
