"""The worker's end of the request plane: a task for each call, its answers within their window.

When a caller closes a call, or is gone, the task is cancelled: its scopes free what it held. Beyond
the window answers wait here: at most what the request may generate (its max_tokens), since nothing
tells the engine to wait. They leave with neighbouring Deltas made one, but only so far that the
window still bounds what a caller has to take. What is answered is the handler's.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Any

from triptych.errors import Draining, EngineFailed, InvalidConfig, TriptychError
from triptych.messages import Delta, Job, WorkerAnswer, WorkerRequest
from triptych.observe.log import RateLimitedLog
from triptych.runtime import frames
from triptych.runtime.authentication import ConnectionKeys, handshake_proof, tags_equal
from triptych.runtime.frames import (
    WINDOW,
    BrokenFrame,
    Buffer,
    CallEnd,
    Challenge,
    FrameKind,
    Hello,
    Proof,
    WindowGrant,
)
from triptych.runtime.link import SILENCE_SECONDS, Link
from triptych.runtime.planes import ListenAddress, Plane, PlaneListener, Planes

log = logging.getLogger(__name__)
JOINED = 32  # numbers (ids and log-probabilities) in a Delta that was made of several

Handler = Callable[[WorkerRequest, "Reply"], Awaitable[None]]


class Reply:
    """The worker's end of one call."""

    def __init__(self, caller: _Caller, call: int) -> None:
        self._caller = caller
        self._call = call
        self._credit = WINDOW
        self._waiting: deque[WorkerAnswer] = deque()
        self._end: CallEnd | None = None
        self._closed = False
        self._granted: asyncio.Future[None] | None = None
        self.task: asyncio.Task[None] | None = None

    def send(self, answer: WorkerAnswer) -> None:
        """Send an answer, or keep it until the caller wants more. Never blocks."""
        if self._closed:
            return
        if self._credit > 0 and not self._waiting:
            self._credit -= 1
            self._caller.post((self._call, answer))
        else:
            self._waiting.append(answer)

    async def hold(self) -> None:
        """Wait until the caller closes the call: what is held meanwhile lives as long."""
        await asyncio.get_running_loop().create_future()

    async def ready(self) -> None:
        """Wait until an answer would leave at once: for what need not be said to one who does not
        listen. The handler alone waits."""
        while self._credit <= 0 or self._waiting:
            self._granted = asyncio.get_running_loop().create_future()
            await self._granted

    def grant(self, answers: int) -> None:
        self._credit += answers
        while self._waiting and self._credit > 0:
            self._credit -= 1
            self._caller.post((self._call, next_answer(self._waiting)))
        if self._granted is not None and not self._granted.done():
            self._granted.set_result(None)
        if self._end is not None:
            self.end(self._end)

    def end(self, end: CallEnd) -> None:
        """Say the last word, after all answers."""
        if self._closed:
            return
        self._end = end
        if not self._waiting:
            self._caller.post((self._call, end))
            self._forget()

    def close(self) -> None:
        """Nobody listens any more: stop the work."""
        if not self._closed:
            self._forget()
            self._waiting.clear()
            if self.task is not None:
                self.task.cancel()

    def _forget(self) -> None:
        self._closed = True
        self._caller.forget(self._call)


class _Caller(Link):
    """A caller's connection, at the server."""

    def __init__(self, server: RequestServer, silence: float) -> None:
        super().__init__(FrameKind.ANSWERS, server.limited, silence)
        self._server = server
        self._hello: Hello | None = None
        self._challenge = Challenge(frames.new_nonce())
        self.replies: dict[int, Reply] = {}

    def on_frame(self, kind: int, body: Buffer) -> None:
        if not self.familiar:
            self._greet(kind, body)
        elif kind == FrameKind.CONTROL:
            for item in frames.decode_control(body):
                reply = self.replies.get(item.call)
                if reply is None:
                    continue  # it ended meanwhile
                if isinstance(item, WindowGrant):
                    reply.grant(item.answers)
                else:
                    reply.close()
        elif kind == FrameKind.OPEN:
            call, ask = frames.decode_open(body)
            if call in self.replies:
                raise BrokenFrame("a call is opened twice")
            self._server.open(self, call, ask)
        else:
            raise BrokenFrame("a frame that no caller sends")

    def _greet(self, kind: int, body: Buffer) -> None:
        if kind == FrameKind.HELLO and self._hello is None:
            self._hello = frames.decode_hello(body)
            self._server.called |= self._server.is_meant(self._hello)
            if self._hello.version != frames.PROTOCOL_VERSION:
                self._refuse(
                    f"the worker speaks protocol version {frames.PROTOCOL_VERSION}, its caller "
                    "another: run the same version of Triptych everywhere"
                )
            else:
                self.write(FrameKind.CHALLENGE, frames.pack(self._challenge))
        elif kind == FrameKind.PROOF and self._hello is not None:
            self._admit(self._hello, frames.decode_proof(body))
        else:
            raise BrokenFrame("not the hello")

    def _admit(self, hello: Hello, proof: Proof) -> None:
        server = self._server
        transcript = frames.transcript(hello, self._challenge, server.binding)
        if not tags_equal(proof.mac, handshake_proof(server.secret, "caller", transcript)):
            why = "the two sides have different secrets: give both the same TRIPTYCH_SECRET"
            if server.binding:
                why += " (or someone between them ends TLS)"
            self._refuse(why)
        elif not server.is_meant(hello):
            self._refuse("another incarnation of a worker has this address now")
        else:
            mine = Proof(handshake_proof(server.secret, "worker", transcript))
            self.write(FrameKind.WELCOME, frames.pack(mine))
            self.greeted(ConnectionKeys(server.secret, "worker", transcript))

    def _refuse(self, why: str) -> None:
        # They try again for ever, every two seconds.
        self._limited.warning("callers_refused", f"a caller is refused: {why}")
        self.write(FrameKind.REFUSED, frames.pack(frames.HandshakeRefused(why)))
        if self._transport is not None:
            self._transport.close()

    def too_large(self, item: Any) -> Any:
        call, _ = item
        if call in self.replies:
            self.replies[call].close()
        why = f"An answer is larger than the {frames.MAX_FRAME} bytes of a frame."
        return call, CallEnd(EngineFailed(why).failure())

    def forget(self, call: int) -> None:
        self.replies.pop(call, None)
        self._server.settle()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self._server.callers.add(self)

    def on_gone(self, why: str) -> None:
        self._server.callers.discard(self)
        for reply in list(self.replies.values()):
            reply.close()


class RequestServer:
    """A worker's open door: one task runs ``handler`` for each call."""

    def __init__(
        self,
        handler: Handler,
        secret: str,
        worker_id: str,
        epoch: int,
        *,
        silence: float = SILENCE_SECONDS,
    ) -> None:
        if not secret:
            raise InvalidConfig("The cluster secret is empty. Set TRIPTYCH_SECRET.")
        self._handler = handler
        self.secret = secret
        self.binding = b""  # to its TLS, where it listens with that
        self.worker_id = worker_id
        self.epoch = epoch
        self.callers: set[_Caller] = set()
        self.limited = RateLimitedLog(log, "frames_broken", "frames_forged", "callers_refused")
        self.called = False  # by somebody who has found this incarnation, if only to be refused
        self._silence = silence
        self._tasks: set[asyncio.Task[None]] = set()
        self._draining = False
        self._idle = asyncio.Event()
        self._listening: PlaneListener | None = None

    async def start(self, host: str, port: int, plane: Plane | None = None) -> str:
        """Listen on a plane, tcp if none is given; gives the address for callers."""
        plane = plane or Planes().named("tcp")
        place = ListenAddress(host, port, self.worker_id, self.epoch)
        self._listening = await plane.listen(lambda: _Caller(self, self._silence), place)
        self.binding = self._listening.binding
        return self._listening.address

    async def drain(self, seconds: float) -> bool:
        """Refuse new jobs and let the open calls end. False: some had not, in that time.

        A worker can still be asked to describe itself.
        """
        self._draining = True
        self.settle()
        try:
            async with asyncio.timeout(seconds):
                await self._idle.wait()
        except TimeoutError:
            return False
        return True

    async def close(self) -> None:
        """Stop listening, cancel the open calls, and leave: their callers find the worker lost."""
        if self._listening is not None:
            self._listening.refuse()
        for caller in self.callers:
            for reply in list(caller.replies.values()):
                reply.close()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await asyncio.gather(*(c.shut("the worker stops") for c in list(self.callers)))
        if self._listening is not None:
            await self._listening.close()

    def open(self, caller: _Caller, call: int, ask: WorkerRequest) -> None:
        if self._draining and isinstance(ask, Job):
            why = Draining("The worker is stopping and takes no new work. Ask another one.")
            caller.post((call, CallEnd(why.failure())))
            return
        reply = caller.replies[call] = Reply(caller, call)
        self._idle.clear()
        reply.task = asyncio.get_running_loop().create_task(self._serve(ask, reply))
        self._tasks.add(reply.task)
        reply.task.add_done_callback(self._tasks.discard)

    def is_meant(self, hello: Hello) -> bool:
        return (hello.worker, hello.epoch) == (self.worker_id, self.epoch)

    def settle(self) -> None:
        """Note whether a drain has come to its end."""
        if self._draining and not any(caller.replies for caller in self.callers):
            self._idle.set()

    async def _serve(self, ask: WorkerRequest, reply: Reply) -> None:
        try:
            await self._handler(ask, reply)
        except TriptychError as error:
            reply.end(CallEnd(error.failure()))
        except asyncio.CancelledError:
            # Closed by the caller: nobody hears this. Cancelled by anything else: it is told.
            # It goes no further: a task that keeps its exception keeps the frames that it came
            # through, and the memory which they hold, until the garbage collector comes.
            reply.end(CallEnd(EngineFailed("The work was cancelled by the worker.").failure()))
        except Exception:  # the worker's edge: whatever happens, the caller is answered
            log.exception("a call failed")
            why = "The worker failed at this request. Its log has the details."
            reply.end(CallEnd(EngineFailed(why).failure()))
        else:
            reply.end(CallEnd())


def next_answer(waiting: deque[WorkerAnswer]) -> WorkerAnswer:
    """The next answer; Deltas that stand in a row become one of up to JOINED numbers."""
    answer = waiting.popleft()
    if not isinstance(answer, Delta):
        return answer
    row, size = [answer], _numbers(answer)
    while waiting and isinstance(following := waiting[0], Delta):
        size += _numbers(following)
        if size > JOINED:
            break
        row.append(following)
        waiting.popleft()
    return _join(row)


def _numbers(delta: Delta) -> int:
    return len(delta.ids) + sum(1 + len(logprob.top) for logprob in delta.logprobs)


def _join(deltas: list[Delta]) -> Delta:
    if len(deltas) == 1:
        return deltas[0]
    spent: dict[str, float] = {}
    for delta in deltas:
        for what, seconds in (delta.timings or {}).items():
            spent[what] = spent.get(what, 0.0) + seconds
    return Delta(
        ids=tuple(token for delta in deltas for token in delta.ids),
        finish=deltas[-1].finish,
        logprobs=tuple(logprob for delta in deltas for logprob in delta.logprobs),
        prompt=next((delta.prompt for delta in deltas if delta.prompt is not None), None),
        timings=spent or None,
    )
