"""On a GPU every arrangement gives the tokens of one process, and tensors stay on the GPU."""

from __future__ import annotations

import asyncio
import random
from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest

from support.gpus import REAL
from support.requests64 import Asked, ask_all, mixed, picture, png
from support.servers import image_part, serving, text_part
from triptych.launch import DEMO
from triptych.model import packaged

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
    large = picture(random.Random(1)).resize((700, 600))
    parts = [image_part(png(large)), text_part("Which colour is it?")]
    turns = [{"role": "user", "content": parts}]
    fields = next(one for one in mixed() if one.greedy).fields
    return (*mixed(), *(Asked(turns, [], [large], fields) for _ in range(3)))


@cache
def run(pattern: str, *flags: str) -> Run:
    with serving(str(packaged(DEMO)), "--pattern", pattern, *FLAGS, *flags) as server:
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


def ids(answers: list[dict[str, Any]]) -> list[list[int]]:
    return [answer["choices"][0]["token_ids"] for answer in answers]


@pytest.mark.parametrize("pattern", ["E/PD", "E/P/D", "EP/D", "E/P*2/D*2"])
def test_tokens_of_one_process_and_large_tensors_in_place(pattern: str) -> None:
    alone, apart = run("EPD"), run(pattern)
    greedy = [at for at, one in enumerate(asked()) if one.greedy]
    for one, other in zip(alone.rounds, apart.rounds, strict=True):
        assert [ids(other)[at] for at in greedy] == [ids(one)[at] for at in greedy]
    assert apart.sent["cuda"] == apart.received["cuda"] > 0
    assert not apart.sent["inline"]


def test_over_the_host_where_it_is_asked_for() -> None:
    alone, apart = run("EPD"), run("E/P/D", "--transport=shm")
    greedy = [at for at, one in enumerate(asked()) if one.greedy]
    assert [ids(apart.rounds[0])[at] for at in greedy] == [ids(alone.rounds[0])[at] for at in greedy]
    assert apart.sent["shm"] > 0
    assert not apart.sent["cuda"]
