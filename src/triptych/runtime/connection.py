"""The caller's end of the request plane: one connection to one incarnation of a worker.

Passes each answer to a callback as it arrives, without a task, future or queue in between, and
grants the worker more answers in batches. Does not choose the worker.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Self, cast

from triptych.errors import InvalidConfig, PayloadTooLarge, TriptychError, WorkerLost, rebuild_error
from triptych.messages import WorkerAnswer, WorkerRequest
from triptych.observe.log import RateLimitedLog
from triptych.runtime import frames
from triptych.runtime.authentication import Buffer, ConnectionKeys, handshake_proof, tags_equal
from triptych.runtime.frames import (
    WINDOW,
    BrokenFrame,
    CallEnd,
    Challenge,
    CloseCall,
    FrameKind,
    Hello,
    Proof,
    WindowGrant,
)
from triptych.runtime.link import HELLO_SECONDS, SILENCE_SECONDS, Link
from triptych.runtime.planes import Planes
from triptych.runtime.planes.tls import peer_fingerprint

log = logging.getLogger(__name__)
limited = RateLimitedLog(
    log, "frames_broken", "frames_forged"
)  # of all connections of this process
REFILL = WINDOW // 2  # answers after which the caller grants as many again


def _ignore(answer: WorkerAnswer) -> None: ...


class Call:
    """The caller's end of one call."""

    __slots__ = ("_connection", "_error", "_paused", "_waiter", "ended", "id", "on_answer", "owed")

    def __init__(
        self, connection: WorkerConnection, call: int, on_answer: Callable[[WorkerAnswer], None]
    ) -> None:
        self._connection = connection
        self.ended = False
        self._waiter: asyncio.Future[None] | None = None
        self._error: TriptychError | None = None
        self._paused = False
        self.id = call
        self.on_answer = on_answer
        self.owed = 0  # answers received and not yet granted again

    async def done(self) -> None:
        """Wait for the end; raises the worker's error, or WorkerLost, once. Returns if the call was
        closed by ``close``."""
        if not self.ended:
            assert self._waiter is None or self._waiter.done(), "only one task may wait for a call"
            self._waiter = self._connection.loop.create_future()
            await self._waiter
        if (error := self._error) is not None:
            self._error = (
                None  # its traceback refers to the waiting frame, which may refer to the call
            )
            try:
                raise error
            finally:
                del error

    def close(self) -> None:
        """Tell the worker to stop, and ignore further answers."""
        if self._connection.forget(self):
            self.end(None)

    def pause(self) -> None:
        """Grant no more answers: the worker stops sending when its window is used up."""
        self._paused = True

    def resume(self) -> None:
        self._paused = False
        if self.owed:
            self.refill()

    def refill(self) -> None:
        """Let the worker send as many answers as arrived, unless paused or ended."""
        if not self._paused and not self.ended:
            self._connection.post(WindowGrant(self.id, self.owed))
            self.owed = 0

    def end(self, error: TriptychError | None) -> None:
        self._error = error
        self.ended = True
        self.on_answer = _ignore  # it may refer to the call: break the reference cycle
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


class WorkerConnection(Link):
    """A caller's connection to one incarnation of a worker."""

    def __init__(self, secret: str, hello: Hello, silence: float) -> None:
        super().__init__(FrameKind.CONTROL, limited, silence)
        self._secret = secret
        self._hello = hello
        self._challenge: Challenge | None = None
        self._binding = b""  # fingerprint of the worker's TLS certificate
        self._transcript = b""  # of the handshake, once there is a challenge
        self._welcome: asyncio.Future[None] = self.loop.create_future()
        self._calls: dict[int, Call] = {}
        self._next = 0
        self._on_closed: list[Callable[[], None]] = []

    @classmethod
    async def open(
        cls,
        address: str,
        secret: str,
        worker_id: str,
        epoch: int,
        *,
        planes: Planes | None = None,
        silence: float = SILENCE_SECONDS,
    ) -> Self:
        """Connect to this incarnation of the worker, on the plane that its address names. Raises
        WorkerLost if that fails."""
        hello = Hello(frames.PROTOCOL_VERSION, worker_id, epoch, frames.new_nonce())
        connection: Self | None = None
        try:
            async with asyncio.timeout(HELLO_SECONDS):
                plane = (planes or Planes()).to(address)
                connection = await plane.connect(address, lambda: cls(secret, hello, silence))
                await connection._welcome
        except (OSError, ValueError, InvalidConfig) as error:  # a TimeoutError has no text
            why = str(error).rstrip(".") or "it does not answer"
            raise WorkerLost(f"Worker {worker_id} cannot be reached: {why}.") from error
        finally:
            if connection is not None and not connection.authenticated:
                connection.abort("the handshake was not completed")
        return connection

    def on_lost(self, callback: Callable[[], None]) -> None:
        """Call ``callback`` once when the connection is closed; at once if it is already."""
        if self.closed.is_set():
            callback()
        else:
            self._on_closed.append(callback)

    def call(self, request: WorkerRequest, on_answer: Callable[[WorkerAnswer], None]) -> Call:
        """Start a call. Calls ``on_answer`` with each answer; it must neither raise nor block.

        Raises WorkerLost if the connection is closed.
        """
        if self.closing:
            raise self._loss(self.reason or "it is being closed")
        self._next += 1
        try:
            pieces = frames.open_frame(self._next, request)
        except BrokenFrame as error:
            raise PayloadTooLarge(f"The request is too large for a frame: {error}.") from error
        call = self._calls[self._next] = Call(self, self._next, on_answer)
        self.write_pieces(pieces, batch=True)
        return call

    async def close(self) -> None:
        await self.close_gracefully("it was closed here")

    def forget(self, call: Call) -> bool:
        """Remove an open call and tell the worker. False: it had ended."""
        if self._calls.pop(call.id, None) is None:
            return False
        self.post(CloseCall(call.id))
        return True

    def on_frame(self, kind: int, body: Buffer) -> None:
        if kind != FrameKind.ANSWERS or not self.authenticated:
            self._handshake(kind, body)
            return
        calls = self._calls
        for number, answer in frames.decode_answers(body):
            call = calls.get(number)
            if call is None:
                continue  # closed here meanwhile
            if type(answer) is CallEnd:
                del calls[number]
                call.end(None if answer.failure is None else rebuild_error(answer.failure))
            else:
                call.owed += 1
                call.on_answer(cast(WorkerAnswer, answer))
                if call.owed >= REFILL:
                    call.refill()

    def _handshake(self, kind: int, body: Buffer) -> None:
        if kind == FrameKind.CHALLENGE and self._challenge is None:
            self._challenge = frames.decode_challenge(body)
            self._transcript = frames.transcript(self._hello, self._challenge, self._binding)
            mine = Proof(handshake_proof(self._secret, "caller", self._transcript))
            self.write(FrameKind.PROOF, frames.pack(mine))
        elif kind == FrameKind.WELCOME and self._challenge is not None and not self._welcome.done():
            proof = frames.decode_proof(body)
            if tags_equal(proof.mac, handshake_proof(self._secret, "worker", self._transcript)):
                self._welcome.set_result(None)
                self.authenticate(ConnectionKeys(self._secret, "caller", self._transcript))
            else:
                self.abort("it does not know our secret: give both sides the same TRIPTYCH_SECRET")
        elif kind == FrameKind.REFUSED and not self._welcome.done():
            self.abort(f"it refuses us: {frames.decode_refused(body).reason}")
        else:
            raise BrokenFrame("a frame that no worker sends")

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self._binding = peer_fingerprint(transport)
        self.write(FrameKind.HELLO, frames.pack(self._hello))

    def on_closed(self, reason: str) -> None:
        if not self._welcome.done():
            self._welcome.set_exception(self._loss(reason))
        calls, self._calls = self._calls, {}
        for call in calls.values():
            call.end(self._loss(reason))
        for callback in self._on_closed:
            callback()

    def _loss(self, reason: str) -> WorkerLost:
        return WorkerLost(f"The connection to worker {self._hello.worker} is gone: {reason}.")
