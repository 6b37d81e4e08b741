"""Requests over HTTP, all at once, and what is in their answers."""

import asyncio

import aiohttp


async def ask_all(url, model, bodies):
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:

        async def ask(body):
            body = body | {"model": model}
            async with session.post(f"{url}/v1/chat/completions", json=body) as got:
                answer = await got.json()
                assert got.status == 200, answer
                return answer

        return await asyncio.gather(*map(ask, bodies))


def ids(answer):
    return answer["choices"][0]["token_ids"]


def logprobs(answer):
    return [token["logprob"] for token in answer["choices"][0]["logprobs"]["content"]]
