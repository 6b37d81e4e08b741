"""Asks a server for many streams at once and times them; every request has a body of its own.

The first event of a stream counts as its first token: the servers that are compared send none
before it. Reading is kept cheap, since client and servers share the cores: no event is parsed but
the one that tells the usage.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

EVENT = b"data: {"
END = b"data: [DONE]"


@dataclass(frozen=True)
class Stream:
    """Seconds since it was asked for, and tokens as the server counts them."""

    first: float
    last: float
    prompt: int
    output: int


def ask_all(port: int, bodies: Sequence[bytes], at_once: int) -> list[Stream]:
    """The answers, in the order of the bodies."""
    return asyncio.run(_ask_all(port, bodies, at_once))


async def _ask_all(port: int, bodies: Sequence[bytes], at_once: int) -> list[Stream]:
    room = asyncio.Semaphore(at_once)

    async def ask(body: bytes) -> Stream:
        async with room:
            return await _ask(port, body)

    return await asyncio.gather(*map(ask, bodies))


async def _ask(port: int, body: bytes) -> Stream:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    head = (
        "POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    start, first, pieces = time.perf_counter(), 0.0, []
    writer.write(head.encode() + body)
    try:
        while piece := await reader.read(1 << 16):
            pieces.append(piece)
            if not first and EVENT in piece:
                first = time.perf_counter() - start
            if END in piece:
                break
    finally:
        writer.close()
    last, answer = time.perf_counter() - start, b"".join(pieces)
    if not first or END not in answer:
        raise RuntimeError(f"no stream came: {answer[:400]!r}")
    usage = _usage(answer)
    return Stream(first, last, usage["prompt_tokens"], usage["completion_tokens"])


def _usage(answer: bytes) -> dict[str, Any]:
    """From the last event that is one."""
    at = answer.rindex(EVENT) + len(EVENT) - 1
    found: dict[str, Any] = json.loads(answer[at : answer.index(b"\n", at)])["usage"]
    return found
