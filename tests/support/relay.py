"""A relay between a caller and a worker, on any request plane: it passes the hello through and then
does with the frames what an attacker would. It knows the wire format, but not the secret."""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Callable, Iterable
from typing import cast

from triptych.runtime.authentication import TAG_BYTES
from triptych.runtime.frames import FrameKind
from triptych.runtime.planes import ListenAddress, Plane, PlaneListener

HEADER = struct.Struct(">IB")
HELLO = {
    FrameKind.HELLO,
    FrameKind.CHALLENGE,
    FrameKind.PROOF,
    FrameKind.WELCOME,
    FrameKind.REFUSED,
}

# The frames that go on instead of one, each with its tag; a frame that is sent back is in ``back``.
Attack = Callable[[bytes, list[bytes]], Iterable[bytes]]


def kind_of(frame: bytes) -> int:
    return frame[HEADER.size - 1]


def honest(frame: bytes, back: list[bytes]) -> Iterable[bytes]:
    return (frame,)


class Relay:
    """Listens on a plane as if it were the worker. ``to_caller`` and ``to_worker`` are applied to
    every frame after the hello; ``seen`` is all that went by in either direction."""

    def __init__(
        self, plane: Plane, worker: str, *, to_caller: Attack = honest, to_worker: Attack = honest
    ) -> None:
        self._plane = plane
        self._worker = worker
        self._attacks = to_worker, to_caller
        self._listening: PlaneListener | None = None
        self._dialling: set[asyncio.Task[None]] = set()
        self.ends: list[_End] = []
        self.seen = bytearray()
        self.passed = [0, 0]  # frames after the hello, to the worker and to the caller

    async def start(self) -> str:
        self._listening = await self._plane.listen(
            self._accept, ListenAddress("127.0.0.1", 0, "relay", 1)
        )
        return self._listening.address

    async def close(self) -> None:
        if self._listening is not None:
            self._listening.refuse()
        for end in self.ends:
            end.leave()
        await asyncio.gather(*self._dialling, return_exceptions=True)
        if self._listening is not None:
            await self._listening.close()

    def _accept(self) -> asyncio.BufferedProtocol:
        caller = _End(self, 0)
        task = asyncio.get_running_loop().create_task(self._dial(caller))
        self._dialling.add(task)
        task.add_done_callback(self._dialling.discard)
        return caller

    async def _dial(self, caller: _End) -> None:
        worker = await self._plane.connect(self._worker, lambda: _End(self, 1))
        caller.meet(worker)
        worker.meet(caller)

    def attack(self, direction: int, frame: bytes) -> tuple[list[bytes], list[bytes]]:
        self.seen += frame
        if kind_of(frame) in HELLO:
            return [frame], []
        self.passed[direction] += 1
        back: list[bytes] = []
        return list(self._attacks[direction](frame, back)), back


class _End(asyncio.BufferedProtocol):
    """One of the relay's two connections. ``direction``: 0, what comes is for the worker."""

    def __init__(self, relay: Relay, direction: int) -> None:
        relay.ends.append(self)
        self._relay = relay
        self._direction = direction
        self._transport: asyncio.Transport | None = None
        self._other: _End | None = None
        self._buffer = bytearray(1 << 16)
        self._came = bytearray()

    def meet(self, other: _End) -> None:
        self._other = other
        self._forward()

    def leave(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def get_buffer(self, sizehint: int) -> bytearray:
        return self._buffer

    def buffer_updated(self, nbytes: int) -> None:
        self._came += self._buffer[:nbytes]
        self._forward()

    def connection_lost(self, exc: Exception | None) -> None:
        if self._other is not None:
            self._other.leave()

    def _forward(self) -> None:
        if self._other is None:
            return
        while len(self._came) >= HEADER.size:
            size, kind = HEADER.unpack_from(self._came)
            whole = HEADER.size + size + (0 if kind in HELLO else TAG_BYTES)
            if len(self._came) < whole:
                return
            frame, self._came = bytes(self._came[:whole]), self._came[whole:]
            on, back = self._relay.attack(self._direction, frame)
            for one in on:
                self._other.send(one)
            for one in back:
                self.send(one)

    def send(self, data: bytes) -> None:
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(data)
