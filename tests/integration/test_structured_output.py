"""Random JSON schemas in every pattern: each answer is valid, and its tokens are the same in all.

``TRIPTYCH_SCHEMAS`` says how many schemas (each with three seeds); the default is few.
"""

from __future__ import annotations

import asyncio
import os
from typing import Any

import aiohttp
import pytest
from tools.json_schemas import MAX_TOKENS, Schema, check_answer, random_schema

from support.one_process import serving_in_one_process
from triptych.checkpoint import packaged_folder

SCHEMAS = int(os.environ.get("TRIPTYCH_SCHEMAS", "3"))
SEEDS = (1, 2, 3)
AT_ONCE = 64
PATTERNS = ("EPD", "E/PD", "E/P/D", "EP/D")

pytestmark = pytest.mark.timeout(max(600, 12 * SCHEMAS))


def body(model: str, schema: Schema, seed: int, **more: Any) -> dict[str, Any]:
    format = {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}
    return {
        "model": model,
        "messages": [{"role": "user", "content": "Describe a red circle."}],
        "response_format": format,
        "seed": seed,
        "max_tokens": MAX_TOKENS,
        "return_token_ids": True,
        **more,
    }


async def ask_all(url: str, bodies: list[dict[str, Any]]) -> list[dict[str, Any]]:
    gate = asyncio.Semaphore(AT_ONCE)
    async with aiohttp.ClientSession() as session:

        async def ask(sent: dict[str, Any]) -> dict[str, Any]:
            async with gate, session.post(f"{url}/v1/chat/completions", json=sent) as got:
                answer: dict[str, Any] = await got.json()
                assert got.status == 200, answer
                return answer

        return await asyncio.gather(*map(ask, bodies))


def test_random_schemas_hold_with_the_same_tokens_in_every_pattern():
    schemas = [random_schema(number) for number in range(SCHEMAS)]
    found: dict[str, list[list[list[int]]]] = {}
    for pattern in PATTERNS:
        flags = (str(packaged_folder("triptych-demo")), "--enable-multimodal", "--pattern", pattern)
        with serving_in_one_process(*flags, "--decode-processes=1") as server:
            bodies = [
                body(server.model, schema, seed, n=1 + (seed == 3))
                for schema in schemas
                for seed in SEEDS
            ]
            answers = asyncio.run(ask_all(server.url, bodies))
            if pattern == PATTERNS[-1]:
                refuse_before_a_stream_starts(server)
        for answer, sent in zip(answers, bodies, strict=True):
            for choice in answer["choices"]:
                assert choice["finish_reason"] == "stop", (sent, choice)
                schema = sent["response_format"]["json_schema"]["schema"]
                check_answer(choice["message"]["content"], schema)
        found[pattern] = [
            [choice["token_ids"] for choice in answer["choices"]] for answer in answers
        ]
    for pattern in PATTERNS[1:]:
        assert found[pattern] == found[PATTERNS[0]], pattern


def refuse_before_a_stream_starts(server: Any) -> None:
    for schema in ({"type": "nonsense"}, {"type": "array", "uniqueItems": True}):
        sent = body(server.model, schema, 1, stream=True)
        answer = server.request("/v1/chat/completions", sent)
        assert answer.status == 400
        assert answer.json["error"]["code"] == "invalid_schema"
        assert answer.json["error"]["param"] == "response_format"
