"""Another process with a TransferClient: reads a JSON command a line, answers a JSON line each."""

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
from triptych.transfer.base import Array, FetchedArrays
from triptych.transfer.client import TransferClient, readable_transports

if "nixl" in readable_transports():
    from triptych.transfer.nixl_agent import RunningTransfer
    from triptych.transfer.nixl_transfers import ReceiveOperation


def opened(variant: str, owner: str, epoch: int) -> TransferClient:
    """``nixl-read`` and ``nixl-write`` move what they fetch, ``nixl-near`` reads in place.

    ``cuda`` is auto with a GPU, which lends memory of any size.
    """
    if variant == "cuda":
        return OnGpu(owner, epoch)
    transport, _, way = variant.partition("-")
    folder = os.environ.get("TEST_TRANSFER_FOLDER", "")
    transfers = TransferClient(transport, owner, epoch, transfer_folder=folder)
    if way:
        transfers._own._always = way != "near"
        transfers._own._method = way
    return transfers


class Peer:
    def __init__(self, variant: str, name: str) -> None:
        self.transfers = opened(variant, name, epoch=7)
        self.gate = threading.Event()
        self.stalled = threading.Event()
        self.held: list[FetchedArrays] = []
        self.arrays: list[Array] = []

    async def publish(self, data: str, lifetime: float = 60.0) -> str:
        raw = base64.b64decode(data)
        array = self.transfers.empty("uint8", (len(raw),))
        put(array, raw)
        self.arrays = [array]
        ticket = await self.transfers.publish([array], lifetime=lifetime)
        return base64.b64encode(msgspec.msgpack.encode(ticket)).decode()

    async def overwrite(self, byte: int) -> None:
        put(self.arrays[0], bytes([byte]) * self.arrays[0].buffer.nbytes)

    async def release(self, ticket: str) -> None:
        self.transfers.release(_ticket(ticket))
        self.arrays = []

    async def fetch(self, ticket: str, keep: bool = False) -> list[Any]:
        fetched = await self.transfers.fetch(_ticket(ticket))
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
        await self.transfers.close()

    async def stall_sending(self) -> None:
        """The agent's thread stands still when it has begun to move something, until ``go_on``."""
        done = RunningTransfer.done

        def stalling(move: RunningTransfer) -> bool:
            begins = not move._state
            result = done(move)
            if begins:
                self._stand_still()
            return result

        RunningTransfer.done = stalling  # type: ignore[method-assign]

    async def stall_receiving(self) -> None:
        """It does so when it has asked for something."""
        start = ReceiveOperation.start

        def stalling(operation: ReceiveOperation) -> None:
            start(operation)
            self._stand_still()

        ReceiveOperation.start = stalling  # type: ignore[method-assign]

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
        counts: dict[str, Any] = msgspec.to_builtins(self.transfers.counts())
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
    await peer.transfers.close()


if __name__ == "__main__":
    asyncio.run(main())
