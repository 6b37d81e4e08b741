"""Whatever ends a request, what it held is given back: counted, not believed."""

import asyncio
import itertools
import json
import os
import random
import signal
import time
from concurrent.futures import ThreadPoolExecutor

import aiohttp
import pytest
from PIL import Image
from tools import tiny

from support.requests64 import picture, png
from support.servers import image_part, serving, text_part

COUNTED = ("kv_blocks_free", "tickets", "segments", "queued", "running")
OFF = ("--cache-embeddings=0", "--cache-decoded=0")  # cached items would be counted
LOST = {"worker_lost", "no_workers"}  # how a request may end when its only worker is killed


@pytest.fixture(scope="module")
def server():
    flags = ["--pattern=E/P/D", "--enable-multimodal", "--torch-step-tokens=64", *OFF]
    with serving(str(tiny.ensure_checkpoint("qwen2_5_vl")), *flags) as server:
        server.fresh = base_line(server)
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
    """What each process holds. The frontend's descriptors are counted from outside."""
    state = server.state()
    frontend = len(os.listdir(f"/proc/{state['frontend']['pid']}/fd"))
    return {"frontend": {"descriptors": frontend}} | {
        worker["id"]: {key: worker[key] for key in (*COUNTED, "descriptors")}
        for worker in state["workers"]
    }


def settled(server, base):
    """Everything is back: blocks, tickets and segments exactly, descriptors not above the base."""
    now = counts(server)
    return now.keys() == base.keys() and all(
        value <= base[name][key] if key == "descriptors" else value == base[name][key]
        for name, held in now.items()
        for key, value in held.items()
    )


def base_line(server):
    """Nothing runs, nothing is held."""

    def idle():
        return server.complete() and all(
            w["kv_blocks_free"] == w["kv_blocks_total"] and not w["tickets"] + w["segments"]
            for w in server.cluster().values()
        )

    server.wait(idle, what="idle at the start")
    time.sleep(0.2)  # for the frontend to close the connections of those who asked
    return counts(server)


@pytest.fixture
def base(server):
    return base_line(server)


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


def test_a_client_that_disconnects(server):
    """All goes back to what it was before the first request."""

    async def all_at_once():
        await asyncio.gather(*(stream(server, i, 1 + i % 5, max_tokens=2000) for i in range(8)))

    for _ in range(3):
        asyncio.run(all_at_once())
    server.wait(lambda: settled(server, server.fresh), what="base line after disconnects")
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


async def whole(session, body):
    """A stream to its end: whole, or cut short by an error that says so."""
    async with session.post("/v1/chat/completions", json=body) as got:
        if got.status != 200:
            return (await got.json())["error"]["code"]
        ids = []
        async for line in got.content:
            event = line.removeprefix(b"data: ").strip()
            if not line.startswith(b"data: "):
                continue
            if event == b"[DONE]":
                return len(ids)
            if "error" in (event := json.loads(event)):
                return event["error"]["code"]
            for choice in event["choices"]:
                ids += choice.get("token_ids") or []
    return "cut off"


async def killed_at_work(server, worker, clients=12, tokens=60):
    """Clients ask on and on until the worker is killed amid its work; how their streams ended."""
    parts = [image_part(png(Image.new("RGB", (560, 560), (40 * i, 90, 9)))) for i in range(4)]
    fields = {"stream": True, "ignore_eos": True, "max_tokens": tokens, "return_token_ids": True}
    model, killed, numbers = server.model, asyncio.Event(), itertools.count()
    connector = aiohttp.TCPConnector(force_close=True, limit=0)
    async with (
        asyncio.timeout(90),  # a stream that hangs fails the test
        aiohttp.ClientSession(server.url, connector=connector) as session,
    ):

        async def go_on(i):
            ends = []
            while not killed.is_set():
                words = text_part(f"Number {next(numbers)}?")  # first: no prefix is known
                messages = [{"role": "user", "content": [words, parts[i % 4], parts[i // 4]]}]
                body = {"model": model, "messages": messages} | fields
                ends.append(await whole(session, body))
            return ends

        asking = [asyncio.create_task(go_on(i)) for i in range(clients)]
        pid = await asyncio.to_thread(kill_at_work, server, worker)
        killed.set()
        return pid, list(itertools.chain(*await asyncio.gather(*asking)))


def kill_at_work(server, worker):
    pids = []

    def struck():
        report = server.cluster()[worker]
        if report["running"]:
            os.kill(report["pid"], signal.SIGKILL)
            pids.append(report["pid"])
        return bool(pids)

    server.wait(struck, what=f"{worker} is at work")
    return pids[0]


@pytest.fixture(scope="module")
def slow():
    """Every stage is slow, so that a worker at work still is when the signal comes."""
    flags = ["--fake-encode-ms=200", "--fake-ttft-ms=200", "--fake-step-ms=5", *OFF]
    with serving("--engine=fake", "--pattern=E/P/D", "--enable-multimodal", *flags) as server:
        yield server


@pytest.mark.parametrize("worker", ["D-0", "P-0", "E-0"])
@pytest.mark.parametrize("engine", ["server", "slow"])
def test_a_worker_killed_at_work_comes_back_and_nothing_is_lost_elsewhere(request, engine, worker):
    server = request.getfixturevalue(engine)
    want = ask(server, 5, max_tokens=12, return_token_ids=True)
    base = base_line(server)
    pid, ends = asyncio.run(killed_at_work(server, worker))
    assert set(ends) <= {60, *LOST}
    server.wait(
        lambda: server.complete() and server.cluster()[worker]["pid"] != pid,
        what="the worker is back",
    )
    again = ask(server, 5, max_tokens=12, return_token_ids=True)
    assert again["choices"][0]["token_ids"] == want["choices"][0]["token_ids"]
    server.wait(lambda: settled(server, base), what=f"base line after {worker} was killed")


def test_health_names_a_missing_role(server):
    pid = server.kill("D-0")
    server.wait(lambda: server.request("/health").status == 503, 5, "503 when a role has no worker")
    assert "D" in json.dumps(server.request("/health").json)
    assert server.request("/live").status == 200
    server.wait(
        lambda: server.healthy() and server.cluster()["D-0"]["pid"] != pid, what="healthy again"
    )


def test_only_cached_items_stay_and_their_bytes_are_bounded():
    flags = ["--pattern=E/PD", "--enable-multimodal", "--cache-embeddings=200000"]
    with serving("--engine=fake", *flags) as server:
        base = base_line(server)
        with ThreadPoolExecutor(8) as pool:
            list(pool.map(lambda i: ask(server, i, max_tokens=4), range(40)))
        base_line(server)
        counters = server.cluster()["E-0"]["counters"]
        kept = counters["embedding_cache_items"]
        assert 0 < kept < 80
        assert counters["embedding_cache_bytes"] <= 200000
        assert counters["embedding_cache_evictions"] >= 80 - kept
        most = base["E-0"]["descriptors"] + kept
        server.wait(
            lambda: server.cluster()["E-0"]["descriptors"] <= most,
            what="idle segments are given up, and what is kept is all that stays",
        )
