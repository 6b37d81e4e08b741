"""A process that stops finishes accepted requests: no request is lost to a SIGTERM."""

import asyncio
import json
import signal
from contextlib import asynccontextmanager

import aiohttp
import pytest

from support.promises import unharmed
from support.servers import image_part, serving, text_part

CLIENTS = 16
TOKENS = 4  # short ones: many begin while a worker is stopping
FLAGS = ["--engine=fake", "--enable-multimodal", "--fake-ttft-ms=5", "--fake-step-ms=5"]


@asynccontextmanager
async def client(server):
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(server.url, connector=connector) as session:
        yield session


def body(model, i, tokens=TOKENS, **fields):
    content = [image_part(bytes([i])), text_part(f"Number {i}?")]
    return {
        "model": model,
        "messages": [{"role": "user", "content": content}],
        "seed": i,
        "max_tokens": tokens,
        "return_token_ids": True,
    } | fields


async def ask(session, model, i):
    async with session.post("/v1/chat/completions", json=body(model, i)) as got:
        answer = await got.json()
        assert got.status == 200, answer
        return answer["choices"][0]["token_ids"]


async def stopped_under_load(server, worker):
    """Sixteen clients ask on and on while the worker stops and comes back; their answers."""
    model, stop = server.model, asyncio.Event()
    async with client(server) as session:
        wanted = [await ask(session, model, i) for i in range(CLIENTS)]
        assert len({tuple(ids) for ids in wanted}) == CLIENTS

        async def go_on(i):
            answers = 0
            while not stop.is_set():
                assert await ask(session, model, i) == wanted[i]
                answers += 1
            return answers

        async with asyncio.TaskGroup() as clients:
            asking = [clients.create_task(go_on(i)) for i in range(CLIENTS)]
            await asyncio.to_thread(stop_while_busy, server, worker)
            stop.set()
    return sum(task.result() for task in asking)


def stop_while_busy(server, worker):
    busy = lambda: server.cluster()[worker]["running"] > 0  # noqa: E731
    server.wait(busy, what=f"{worker} is at work")
    pid = server.kill(worker, signal.SIGTERM)
    back = lambda: server.cluster().get(worker, {"pid": pid})["pid"] != pid  # noqa: E731
    server.wait(back, what=f"{worker} has ended and is back")


@pytest.mark.parametrize(
    ("pattern", "workers"), [("EPD*2", ["EPD-0"]), ("E/P*2/D*2", ["P-0", "D-1"])]
)
def test_f8_a_worker_that_stops_loses_no_request(pattern, workers):
    """Guard: Draining among the errors that requests migrate for (without it they get a 503)."""
    with serving(*FLAGS, f"--pattern={pattern}") as server:
        for worker in workers:
            try:
                with unharmed(server, worker):
                    assert asyncio.run(stopped_under_load(server, worker)) > 2 * CLIENTS
            except BaseExceptionGroup as errors:
                errors.add_note(server.tail())  # which worker was lost, and to what
                raise


async def stream(session, model, i, begun):
    """The token ids of a stream to its end; ``begun`` is called at the first."""
    ids, done = [], False
    fields = {"stream": True, "max_tokens": 150}
    async with session.post("/v1/chat/completions", json=body(model, i, **fields)) as got:
        assert got.status == 200
        async for line in got.content:
            if line.startswith(b"data: [DONE]"):
                done = True
            elif line.startswith(b"data: "):
                for choice in json.loads(line[6:])["choices"]:
                    if not ids and choice.get("token_ids"):
                        begun()
                    ids += choice.get("token_ids") or []
    assert done
    return ids


@pytest.mark.parametrize("pattern", ["EPD", "E/P/D"])
def test_a_server_that_stops_finishes_accepted_requests(pattern):
    async def stopped(server):
        model = server.model
        begun = asyncio.Semaphore(0)
        async with client(server) as session, asyncio.timeout(60):
            streams = [
                asyncio.create_task(stream(session, model, i, begun.release))
                for i in range(CLIENTS)
            ]
            for _ in streams:
                await begun.acquire()
            server.process.send_signal(signal.SIGTERM)
            while (await status(session, "/health")) != 503:
                assert not any(task.done() for task in streams)
            assert await status(session, "/live") == 200
            async with session.post("/v1/chat/completions", json=body(model, 0)) as refused:
                assert refused.status == 503
            assert not any(task.done() for task in streams)  # all that was while they ran
            return await asyncio.gather(*streams)

    flags = [*FLAGS, "--fake-step-ms=20", f"--pattern={pattern}"]
    with serving(*flags) as server:
        answers = asyncio.run(stopped(server))
        assert server.process.wait(timeout=30) == 0
    assert all(len(ids) == 150 for ids in answers)
    assert len({tuple(ids) for ids in answers}) == CLIENTS


async def status(session, path):
    async with session.get(path) as got:
        return got.status
