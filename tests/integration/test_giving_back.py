"""Whatever ends a request, what it held is given back: counted, not believed."""

import asyncio
import json
import random
import signal
from concurrent.futures import ThreadPoolExecutor

import aiohttp
import pytest

from support.requests64 import picture, png
from support.servers import image_part, serving, text_part
from triptych.engines.torch import tiny

COUNTED = ("kv_blocks_free", "tickets", "segments", "queued", "running")


@pytest.fixture(scope="module")
def server():
    flags = ["--pattern=E/P/D", "--enable-multimodal", "--torch-step-tokens=64"]
    with serving(str(tiny.ensure("qwen2_5_vl")), *flags) as server:
        with ThreadPoolExecutor(8) as pool:  # pools and caches grow to the size of the load
            list(pool.map(lambda i: ask(server, i, max_tokens=40), range(24)))
        yield server


def content(i):
    rng = random.Random(i)
    return [image_part(png(picture(rng))), image_part(png(picture(rng))), text_part(f"Number {i}?")]


def ask(server, i, **fields):
    answer = server.chat(content(i), ignore_eos=True, **fields)
    assert answer.status == 200, answer.body
    return answer.json


def counts(server):
    return {
        name: {key: worker[key] for key in (*COUNTED, "descriptors")}
        for name, worker in server.cluster().items()
    }


def settled(server, base):
    """Everything is back: blocks, tickets and segments exactly, descriptors not above the base."""
    now = counts(server)
    return now.keys() == base.keys() and all(
        all(now[w][key] == base[w][key] for key in COUNTED)
        and now[w]["descriptors"] <= base[w]["descriptors"]
        for w in base
    )


@pytest.fixture
def base(server):
    """The base line: nothing runs, nothing is held."""
    idle = lambda: all(  # noqa: E731
        w["kv_blocks_free"] == w["kv_blocks_total"] and not w["tickets"] + w["segments"]
        for w in server.cluster().values()
    )
    server.wait(idle, what="idle at the start")
    return counts(server)


async def stream(server, i, until, **fields):
    """Read a stream until ``until`` events have come, then hang up in the middle."""
    messages = [{"role": "user", "content": content(i)}]
    body = {
        "model": server.model,
        "messages": messages,
        "stream": True,
        "ignore_eos": True,
    } | fields
    async with (
        aiohttp.ClientSession(connector=aiohttp.TCPConnector(force_close=True)) as session,
        session.post(f"{server.url}/v1/chat/completions", json=body) as got,
    ):
        assert got.status == 200
        events = 0
        async for line in got.content:
            events += line.startswith(b"data: ")
            if events >= until:
                return


def test_a_client_that_disconnects(server, base):
    async def all_at_once():
        await asyncio.gather(*(stream(server, i, 1 + i % 5, max_tokens=2000) for i in range(8)))

    for _ in range(3):
        asyncio.run(all_at_once())
    server.wait(lambda: settled(server, base), what="base line after disconnects")
    assert ask(server, 1, max_tokens=4)


def test_a_client_that_gives_up_before_the_first_token(server, base):
    async def give_up(i):
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.01 * (1 + i % 6)):
                await stream(server, 100 + i, 10**9, max_tokens=2000)

    async def all_at_once():
        await asyncio.gather(*(give_up(i) for i in range(12)))

    asyncio.run(all_at_once())
    server.wait(lambda: settled(server, base), what="base line after early disconnects")
    assert ask(server, 2, max_tokens=4)


def test_a_stop_string_ends_the_work(server, base):
    whole = ask(server, 3, max_tokens=40)["choices"][0]["message"]["content"]
    stop = whole[6:9]
    cut = ask(server, 3, max_tokens=2000, stop=[stop])["choices"][0]
    assert cut["finish_reason"] == "stop"
    assert cut["message"]["content"] == whole[: whole.index(stop)]
    server.wait(lambda: settled(server, base), what="base line after a stop string")


def test_refused_requests_leave_nothing(server, base):
    bad = [image_part(b"no picture"), text_part("?")]
    for _ in range(5):
        assert server.chat(bad).json["error"]["code"] == "invalid_media"
        assert server.chat(content(1), max_tokens=10**6).json["error"]["code"] in {
            "context_length_exceeded",
            "invalid_value",
        }
        mixed = [image_part(png(picture(random.Random(1)))), *bad]
        assert server.chat(mixed).json["error"]["code"] == "invalid_media"
    server.wait(lambda: settled(server, base), what="base line after refusals")


@pytest.mark.parametrize("worker", ["D-0", "P-0", "E-0"])
def test_a_killed_worker_comes_back_and_nothing_is_lost_elsewhere(server, base, worker):
    want = ask(server, 5, max_tokens=12, return_token_ids=True)

    async def killed_in_the_middle():
        running = [asyncio.create_task(stream(server, i, 10**9, max_tokens=1500)) for i in range(6)]
        await asyncio.sleep(0.5)
        pid = await asyncio.to_thread(server.kill, worker, signal.SIGKILL)
        await asyncio.wait(running, timeout=30)
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
        return pid

    pid = asyncio.run(killed_in_the_middle())
    server.wait(
        lambda: server.healthy() and server.cluster()[worker]["pid"] != pid,
        what="the worker is back",
    )
    again = ask(server, 5, max_tokens=12, return_token_ids=True)
    assert again["choices"][0]["token_ids"] == want["choices"][0]["token_ids"]

    def others_settled():
        now = counts(server)
        return (
            all(all(now[w][key] == base[w][key] for key in COUNTED) for w in base if w in now)
            and now.keys() == base.keys()
        )

    server.wait(others_settled, what=f"base line after {worker} was killed")


def test_health_tells_a_missing_role(server):
    pid = server.kill("D-0")
    server.wait(lambda: server.request("/health").status == 503, 5, "503 when a role has no worker")
    assert "D" in json.dumps(server.request("/health").json)
    assert server.request("/live").status == 200
    server.wait(
        lambda: server.healthy() and server.cluster()["D-0"]["pid"] != pid, what="healthy again"
    )
