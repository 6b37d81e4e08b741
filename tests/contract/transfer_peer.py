"""Another process with an Exchange: reads one JSON command a line, answers one JSON line each."""

from __future__ import annotations

import asyncio
import base64
import os
import sys
from typing import Any

import msgspec

from triptych.errors import TriptychError
from triptych.messages import Ticket
from triptych.transfer.base import Array, Fetched
from triptych.transfer.exchange import Exchange


class Peer:
    def __init__(self, transport: str) -> None:
        self.exchange = Exchange(transport, f"peer-{os.getpid()}", epoch=7)
        self.held: list[Fetched] = []
        self.arrays: list[Array] = []

    async def publish(self, data: str, lifetime: float = 60.0) -> str:
        raw = base64.b64decode(data)
        array = self.exchange.empty("uint8", (len(raw),))
        array.buffer[:] = raw
        self.arrays = [array]
        ticket = await self.exchange.publish([array], lifetime=lifetime)
        return base64.b64encode(msgspec.msgpack.encode(ticket)).decode()

    async def overwrite(self, byte: int) -> None:
        self.arrays[0].buffer[:] = bytes([byte]) * self.arrays[0].buffer.nbytes

    async def release(self, ticket: str) -> None:
        self.exchange.release(_ticket(ticket))
        self.arrays = []

    async def fetch(self, ticket: str, keep: bool = False) -> list[Any]:
        fetched = await self.exchange.fetch(_ticket(ticket))
        answer = [
            (array.dtype, array.shape, base64.b64encode(array.buffer).decode())
            for array in fetched.arrays
        ]
        fetched.check()
        if keep:
            self.held.append(fetched)
        else:
            fetched.close()
        return answer

    async def check(self) -> None:
        for fetched in self.held:
            fetched.check()

    async def counts(self) -> dict[str, Any]:
        counts: dict[str, Any] = msgspec.to_builtins(self.exchange.counts())
        return counts | {"descriptors": len(os.listdir("/proc/self/fd"))}


def _ticket(text: str) -> Ticket:
    return msgspec.msgpack.decode(base64.b64decode(text), type=Ticket)


async def main() -> None:
    peer = Peer(sys.argv[1])
    while line := await asyncio.to_thread(sys.stdin.readline):
        command = msgspec.json.decode(line)
        try:
            answer = {"value": await getattr(peer, command.pop("do"))(**command)}
        except TriptychError as error:
            answer = {"error": error.code}
        print(msgspec.json.encode(answer).decode(), flush=True)
    await peer.exchange.close()


if __name__ == "__main__":
    asyncio.run(main())
