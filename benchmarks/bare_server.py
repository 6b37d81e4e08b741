"""The floor that a frontend is measured against: an aiohttp loop on uvloop that answers like a chat
server, with no tokenizer, no template and no worker behind it.

It parses each body as JSON and writes each token on its own. ``python -m benchmarks.bare_server
PORT [STEP_MS]``: with a step time, tokens come at that pace instead of as fast as possible.
"""

from __future__ import annotations

import asyncio
import json
import sys

import uvloop
from aiohttp import web

PATH = "/v1/chat/completions"
YIELD_EVERY = 8  # tokens after which other streams get their turn


def usage(tokens: int) -> dict[str, int]:
    return {"prompt_tokens": 1, "completion_tokens": tokens, "total_tokens": tokens + 1}


async def stream(request: web.Request, tokens: int, step: float) -> web.StreamResponse:
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    await response.prepare(request)
    for i in range(tokens):
        event = {
            "id": "chatcmpl-0",
            "object": "chat.completion.chunk",
            "created": 0,
            "model": "bare",
            "choices": [{"index": 0, "delta": {"content": f"tok{i}"}, "finish_reason": None}],
        }
        await response.write(b"data: " + json.dumps(event).encode() + b"\n\n")
        if step or i % YIELD_EVERY == YIELD_EVERY - 1:
            await asyncio.sleep(step)
    last = json.dumps({"choices": [], "usage": usage(tokens)}).encode()
    await response.write(b"data: " + last + b"\n\ndata: [DONE]\n\n")
    await response.write_eof()
    return response


def application(step: float) -> web.Application:
    async def chat(request: web.Request) -> web.StreamResponse:
        body = json.loads(await request.read())
        tokens = body.get("max_tokens", 16)
        if body.get("stream"):
            return await stream(request, tokens, step)
        message = {"role": "assistant", "content": "x" * tokens}
        return web.json_response(
            {
                "id": "chatcmpl-0",
                "object": "chat.completion",
                "created": 0,
                "model": body["model"],
                "choices": [{"index": 0, "message": message, "finish_reason": "length"}],
                "usage": usage(tokens),
            }
        )

    app = web.Application(client_max_size=64 << 20)
    app.router.add_post(PATH, chat)
    return app


def main() -> None:
    port = int(sys.argv[1])
    step = float(sys.argv[2]) / 1e3 if len(sys.argv) > 2 else 0.0
    uvloop.install()
    web.run_app(application(step), host="127.0.0.1", port=port, print=None, access_log=None)


if __name__ == "__main__":
    main()
