"""What a connection of the request plane writes, and in how many system calls."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

from triptych.observe.log import RateLimitedLog
from triptych.runtime import frames, link
from triptych.runtime.authentication import Buffer, ConnectionKeys
from triptych.runtime.frames import FrameKind, Inbox


class Recorder(asyncio.Transport):
    """Keeps what was written, one entry for each system call."""

    def __init__(self) -> None:
        super().__init__()
        self.written: list[bytes] = []

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None: ...

    def write(self, data: Any) -> None:
        self.written.append(bytes(data))

    def is_closing(self) -> bool:
        return False

    def frames(self) -> list[tuple[int, bytes]]:
        """What the peer reads; it checks the tags, and so the order."""
        inbox = Inbox(frames.MAX_FRAME)
        inbox.mac = ConnectionKeys("secret", "worker", b"t").receiving
        found: list[tuple[int, bytes]] = []
        for data in self.written:
            for at in range(0, len(data), 1000):
                piece = data[at : at + 1000]
                inbox.get_buffer()[: len(piece)] = piece
                found += ((kind, bytes(body)) for kind, body in inbox.received(len(piece)))
        return found


class Sender(link.Link):
    def on_frame(self, kind: int, body: Buffer) -> None: ...

    def on_closed(self, reason: str) -> None: ...


def connected() -> tuple[Sender, Recorder]:
    sender = Sender(FrameKind.CONTROL, RateLimitedLog(logging.getLogger(__name__)))
    transport = Recorder()
    sender.connection_made(transport)
    sender.authenticate(ConnectionKeys("secret", "caller", b"t"))
    return sender, transport


def write_call(sender: Sender, body: bytes) -> None:
    sender.write_pieces([frames.header(FrameKind.OPEN, len(body)), body], batch=True)


async def turn() -> None:
    await asyncio.sleep(0)
    await asyncio.sleep(0)


async def test_small_frames_of_a_turn_are_one_write() -> None:
    sender, transport = connected()
    for body in (b"a", b"b", b"c"):
        write_call(sender, body)
    assert not transport.written
    await turn()
    assert len(transport.written) == 1
    write_call(sender, b"d")
    await turn()
    assert len(transport.written) == 2
    assert [body for _, body in transport.frames()] == [b"a", b"b", b"c", b"d"]


async def test_a_batch_is_bounded() -> None:
    sender, transport = connected()
    body = bytes(link.WRITE_BATCH // 4)
    for _ in range(8):
        write_call(sender, body)
    assert len(transport.written) == 2  # at once: a worker can begin meanwhile
    await turn()
    assert [body for _, body in transport.frames()] == [body] * 8


async def test_what_is_posted_or_large_does_not_overtake_a_batch() -> None:
    sender, transport = connected()
    large = bytes(link.WRITE_BUFFER + 1)
    write_call(sender, b"a")
    write_call(sender, large)
    write_call(sender, b"b")
    sender.post(7)
    await turn()
    write_call(sender, b"c")
    sender.write(FrameKind.HEARTBEAT)
    await turn()
    sizes = [(kind, len(body)) for kind, body in transport.frames()]
    assert sizes == [
        (FrameKind.OPEN, 1),
        (FrameKind.OPEN, len(large)),
        (FrameKind.OPEN, 1),
        (FrameKind.CONTROL, 2),
        (FrameKind.OPEN, 1),
        (FrameKind.HEARTBEAT, 0),
    ]


async def test_a_batch_leaves_before_the_connection_is_closed() -> None:
    sender, transport = connected()
    write_call(sender, b"a")
    closing = asyncio.create_task(sender.close_gracefully("a test"))
    transport.close = lambda: sender.connection_lost(None)  # type: ignore[method-assign]
    await closing
    assert [body for _, body in transport.frames()] == [b"a"]
