"""Another process with an Exchange: reads one JSON command a line, answers one JSON line each."""

from __future__ import annotations

import asyncio
import base64
import os
import sys
import threading
from typing import Any

import msgspec

from support.gpus import OnGpu, got, put
from triptych.errors import TriptychError
from triptych.messages import Ticket
from triptych.transfer.base import Array, Fetched
from triptych.transfer.exchange import Exchange, readable

if "nixl" in readable():
    from triptych.transfer.agent import Move
    from triptych.transfer.fetching import Receiving


def opened(variant: str, owner: str, epoch: int) -> Exchange:
    """``nixl-read`` and ``nixl-write`` move what they fetch, ``nixl-near`` reads in place.

    ``cuda`` is auto with a GPU, which lends memory of any size.
    """
    if variant == "cuda":
        return OnGpu(owner, epoch)
    transport, _, way = variant.partition("-")
    exchange = Exchange(transport, owner, epoch)
    if way:
        exchange._mine._always = way != "near"
        exchange._mine._way = way
    return exchange


class Peer:
    def __init__(self, variant: str, name: str) -> None:
        self.exchange = opened(variant, name, epoch=7)
        self.gate = threading.Event()
        self.stalled = threading.Event()
        self.held: list[Fetched] = []
        self.arrays: list[Array] = []

    async def publish(self, data: str, lifetime: float = 60.0) -> str:
        raw = base64.b64decode(data)
        array = self.exchange.empty("uint8", (len(raw),))
        put(array, raw)
        self.arrays = [array]
        ticket = await self.exchange.publish([array], lifetime=lifetime)
        return base64.b64encode(msgspec.msgpack.encode(ticket)).decode()

    async def overwrite(self, byte: int) -> None:
        put(self.arrays[0], bytes([byte]) * self.arrays[0].buffer.nbytes)

    async def release(self, ticket: str) -> None:
        self.exchange.release(_ticket(ticket))
        self.arrays = []

    async def fetch(self, ticket: str, keep: bool = False) -> list[Any]:
        fetched = await self.exchange.fetch(_ticket(ticket))
        answer = [
            (array.dtype, array.shape, base64.b64encode(got(array)).decode())
            for array in fetched.arrays
        ]
        fetched.check()
        if keep:
            self.held.append(fetched)
        else:
            fetched.close()
        return answer

    async def close(self) -> None:
        await self.exchange.close()

    async def stall_sending(self) -> None:
        """The agent's thread stands still when it has begun to move something, until ``go_on``."""
        done = Move.done

        def stalling(move: Move) -> bool:
            begins = not move._state
            result = done(move)
            if begins:
                self._stand_still()
            return result

        Move.done = stalling  # type: ignore[method-assign]

    async def stall_receiving(self) -> None:
        """It does so when it has asked for something."""
        start = Receiving.start

        def stalling(errand: Receiving) -> None:
            start(errand)
            self._stand_still()

        Receiving.start = stalling  # type: ignore[method-assign]

    def _stand_still(self) -> None:
        self.stalled.set()
        self.gate.wait()

    async def wait_for_stall(self) -> None:
        await asyncio.to_thread(self.stalled.wait)

    async def go_on(self) -> None:
        self.gate.set()

    async def fetch_in_background(self, ticket: str) -> None:
        self.fetching = asyncio.create_task(self.fetch(ticket))

    async def check(self) -> None:
        for fetched in self.held:
            fetched.check()

    async def counts(self) -> dict[str, Any]:
        counts: dict[str, Any] = msgspec.to_builtins(self.exchange.counts())
        return counts | {"descriptors": len(os.listdir("/proc/self/fd"))}


def _ticket(text: str) -> Ticket:
    return msgspec.msgpack.decode(base64.b64decode(text), type=Ticket)


async def main() -> None:
    peer = Peer(sys.argv[1], sys.argv[2] if len(sys.argv) > 2 else f"peer-{os.getpid()}")
    while line := await asyncio.to_thread(sys.stdin.readline):
        command = msgspec.json.decode(line)
        try:
            answer = {"value": await getattr(peer, command.pop("do"))(**command)}
        except TriptychError as error:
            answer = {"error": error.code}
        print(msgspec.json.encode(answer).decode(), flush=True)
    peer.gate.set()
    await peer.exchange.close()


if __name__ == "__main__":
    asyncio.run(main())
