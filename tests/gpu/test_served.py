"""On a GPU every arrangement gives the tokens of one process, and tensors stay on the GPU."""

from __future__ import annotations

import asyncio
import random
from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest
from PIL import Image

from support.gpus import REAL
from support.requests64 import Asked, ask_all, mixed, picture, png
from support.servers import image_part, serving, text_part
from triptych.checkpoint import packaged_folder
from triptych.commands.launch import DEMO

pytestmark = [
    pytest.mark.skipif(REAL is None, reason="there is no GPU"),
    pytest.mark.timeout(300),
]
FLAGS = ["--enable-multimodal", "--device=cuda", "--dtype=float32", "--torch-kv-blocks=2000"]


@dataclass(frozen=True)
class Run:
    rounds: list[list[dict[str, Any]]]
    sent: dict[str, int]
    received: dict[str, int]


@cache
def asked() -> tuple[Asked, ...]:
    """The sixty-four, and some whose embeddings are worth the GPU's memory."""
    small = picture(random.Random(1))
    large = small.resize((700, 600))
    fields = next(one for one in mixed() if one.greedy).fields

    def about(*pictures: Image.Image) -> Asked:
        parts = [*(image_part(png(one)) for one in pictures), text_part("Which colour is it?")]
        return Asked([{"role": "user", "content": parts}], [], list(pictures), fields)

    return (*mixed(), about(large), about(large, small), about(small, large, small))


@cache
def run(pattern: str, *flags: str) -> Run:
    with serving(str(packaged_folder(DEMO)), "--pattern", pattern, *FLAGS, *flags) as server:
        rounds = [asyncio.run(ask_all(server.url, server.model, asked())) for _ in range(2)]
        settled = lambda: all(  # noqa: E731
            w["kv_blocks_free"] == w["kv_blocks_total"] and not w["tickets"] and not w["segments"]
            for w in server.cluster().values()
        )
        server.wait(settled, what="every block, ticket and segment is given back")
        workers = list(server.cluster().values())
    sums = [
        {name: sum(w[what].get(name, 0) for w in workers) for name in ("cuda", "shm", "inline")}
        for what in ("bytes_sent", "bytes_received")
    ]
    return Run(rounds, *sums)


def greedy(answers: list[dict[str, Any]]) -> list[list[int]]:
    """The tokens of those requests that were not sampled."""
    pairs = zip(asked(), answers, strict=True)
    return [answer["choices"][0]["token_ids"] for one, answer in pairs if one.greedy]


@pytest.mark.parametrize("pattern", ["E/P/D", "EP/D"])
def test_tokens_of_one_process_and_large_tensors_in_place(pattern: str) -> None:
    alone, apart = run("EPD"), run(pattern)
    assert list(map(greedy, apart.rounds)) == list(map(greedy, alone.rounds))
    assert apart.sent["cuda"] == apart.received["cuda"] > 0
    assert not apart.sent["inline"]


def test_over_the_host_where_it_is_asked_for() -> None:
    alone, apart = run("EPD"), run("E/P/D", "--transport=shm")
    assert greedy(apart.rounds[0]) == greedy(alone.rounds[0])
    assert apart.sent["shm"] > 0
    assert not apart.sent["cuda"]


def test_a_pool_that_is_too_small_costs_time_and_no_token() -> None:
    alone, apart = run("EPD"), run("E/P/D", "--gpu-transfer-bytes=9000000")
    assert list(map(greedy, apart.rounds)) == list(map(greedy, alone.rounds))
    assert apart.sent["cuda"] > 0
    assert apart.sent["shm"] > run("E/P/D").sent["shm"]


def test_a_worker_killed_while_others_read_its_memory_changes_no_token() -> None:
    with serving(str(packaged_folder(DEMO)), "--pattern", "E/P*2/D", *FLAGS) as server:

        async def ask() -> list[dict[str, Any]]:
            asking = asyncio.ensure_future(ask_all(server.url, server.model, asked()))
            # Something is on its way over the GPU, and more is to come.
            started = lambda: server.cluster()["D-0"]["bytes_received"].get("cuda", 0)  # noqa: E731
            await asyncio.to_thread(server.wait, started)
            server.kill("P-0")
            return await asking

        assert greedy(asyncio.run(ask())) == greedy(run("EPD").rounds[0])
        settled = lambda: all(  # noqa: E731
            not w["tickets"] and not w["segments"] for w in server.cluster().values()
        )
        server.wait(settled, what="every ticket and segment is given back")
