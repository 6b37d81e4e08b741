"""Several workers of a role share the work, and media go where they are known."""

import asyncio

import aiohttp
import pytest

from support.servers import image_part, serving, text_part

REQUESTS = 40


async def ask_all(url, model, at_once, first=0):
    """One picture each, numbered from ``first``; ``at_once`` of them at a time."""
    gate = asyncio.Semaphore(at_once)
    async with aiohttp.ClientSession(url, connector=aiohttp.TCPConnector(limit=0)) as session:

        async def ask(i):
            content = [image_part((first + i).to_bytes(2)), text_part(f"Number {i}?")]
            messages = [{"role": "user", "content": content}]
            body = {"model": model, "messages": messages, "max_tokens": 4}
            async with gate, session.post("/v1/chat/completions", json=body) as got:
                assert got.status == 200, await got.text()

        await asyncio.gather(*(ask(i) for i in range(REQUESTS)))


def work_done(server, counter):
    """By worker, for those who count it."""
    counters = {name: worker["counters"] for name, worker in server.cluster().items()}
    return {name: counts[counter] for name, counts in counters.items() if counter in counts}


@pytest.fixture(scope="module", params=["round-robin", "random", "least-loaded"])
def routed(request):
    flags = ["--engine=fake", "--enable-multimodal", "--fake-step-ms=2", "--pattern=E*2/PD*2"]
    with serving(*flags, f"--routing={request.param}") as server:
        yield request.param, server


@pytest.mark.parametrize("at_once", [1, 16])
def test_both_workers_of_a_role_get_work(routed, at_once):
    routing, server = routed
    before = {name: work_done(server, name) for name in ("encoded_items", "generated_tokens")}
    asyncio.run(ask_all(server.url, server.model, at_once, first=1000 * at_once))
    for counter, each in (("encoded_items", 1), ("generated_tokens", 4)):
        done = {
            name: count - before[counter][name]
            for name, count in work_done(server, counter).items()
        }
        assert len(done) == 2
        assert sum(done.values()) == REQUESTS * each
        by_turns = (routing, at_once, counter) == ("least-loaded", 1, "generated_tokens")
        if routing == "round-robin" or by_turns:
            assert set(done.values()) == {REQUESTS * each / 2}
        else:  # all on one side by chance: once in 10^11 runs
            assert min(done.values()) > 0


def test_a_picture_goes_where_it_was_encoded_before():
    """So each is encoded once in all, by whichever worker it belongs to."""
    flags = ["--engine=fake", "--enable-multimodal", "--pattern=E*2/PD"]
    with serving(*flags) as server:
        before = work_done(server, "encoded_items")
        for _ in range(3):
            asyncio.run(ask_all(server.url, server.model, 1))
        encoded = {
            name: count - before[name] for name, count in work_done(server, "encoded_items").items()
        }
        assert sum(encoded.values()) == REQUESTS
        assert min(encoded.values()) > 0
        assert sum(work_done(server, "embedding_cache_hits").values()) == 2 * REQUESTS


def test_choices_and_fifty_at_once_share_one_encode():
    flags = ["--engine=fake", "--enable-multimodal", "--fake-encode-ms=50", "--pattern=E/PD"]
    with serving(*flags) as server:
        before = work_done(server, "encoded_items")["E-0"]
        content = [image_part(b"one picture"), text_part("Which?")]
        body = {"messages": [{"role": "user", "content": content}], "max_tokens": 4}
        answer = server.request("/v1/chat/completions", body | {"model": server.model, "n": 4})
        assert len(answer.json["choices"]) == 4
        assert work_done(server, "encoded_items")["E-0"] == before + 1

        async def ask_fifty():
            async with aiohttp.ClientSession(server.url) as session:

                async def ask(i):
                    content = [image_part(b"another"), text_part(f"Number {i}?")]
                    one = body | {"messages": [{"role": "user", "content": content}]}
                    async with session.post(
                        "/v1/chat/completions", json=one | {"model": server.model}
                    ) as got:
                        assert got.status == 200, await got.text()

                await asyncio.gather(*(ask(i) for i in range(50)))

        asyncio.run(ask_fifty())
        assert work_done(server, "encoded_items")["E-0"] == before + 2
        counters = server.cluster()["E-0"]["counters"]
        assert counters["encodes_joined"] + counters["embedding_cache_hits"] >= 3 + 49
