"""The worker's end of the request plane: a task for each call, its answers within their window.

When a caller closes a call or disconnects, the task is cancelled, and its scopes release what it
holds. Answers beyond the window wait here: at most what the request may generate (its max_tokens),
since nothing slows the engine down. They leave with adjacent Deltas merged, up to a size at which
the window still bounds what a caller receives. The handler decides what to answer.
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
from triptych.runtime.authentication import Buffer, ConnectionKeys, handshake_proof, tags_equal
from triptych.runtime.concurrency import wait_at_most
from triptych.runtime.frames import (
    WINDOW,
    BrokenFrame,
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
MERGED = 32  # token ids and log-probabilities in a merged Delta, at most

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
        """Send an answer, or queue it until the caller grants more. Never blocks."""
        if self._closed:
            return
        if self._credit > 0 and not self._waiting:
            self._credit -= 1
            self._caller.post((self._call, answer))
        else:
            self._waiting.append(answer)

    async def wait_until_closed(self) -> None:
        """Wait until the caller closes the call, which cancels this task."""
        await asyncio.get_running_loop().create_future()

    async def ready(self) -> None:
        """Wait until an answer would be sent at once, for answers that a slow caller may skip. Only
        the handler waits here."""
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
        """End the call after all queued answers."""
        if self._closed:
            return
        self._end = end
        if not self._waiting:
            self._caller.post((self._call, end))
            self._forget()

    def close(self) -> None:
        """The caller wants no more answers: cancel the task."""
        if not self._closed:
            self._forget()
            self._waiting.clear()
            if self.task is not None:
                self.task.cancel()

    def _forget(self) -> None:
        self._closed = True
        self._caller.forget(self._call)


class _Caller(Link):
    """The server's side of one caller's connection."""

    def __init__(self, server: CallServer, silence: float) -> None:
        super().__init__(FrameKind.ANSWERS, server.limited, silence)
        self._server = server
        self._hello: Hello | None = None
        self._challenge = Challenge(frames.new_nonce())
        self.replies: dict[int, Reply] = {}

    def on_frame(self, kind: int, body: Buffer) -> None:
        if not self.authenticated:
            self._handshake(kind, body)
        elif kind == FrameKind.CONTROL:
            for item in frames.decode_control(body):
                reply = self.replies.get(item.call)
                if reply is None:
                    continue  # it has ended already
                if isinstance(item, WindowGrant):
                    reply.grant(item.answers)
                else:
                    reply.close()
        elif kind == FrameKind.OPEN:
            call, request = frames.decode_open(body)
            if call in self.replies:
                raise BrokenFrame("a call is opened twice")
            self._server.open(self, call, request)
        else:
            raise BrokenFrame("a frame that no caller sends")

    def _handshake(self, kind: int, body: Buffer) -> None:
        if kind == FrameKind.HELLO and self._hello is None:
            self._hello = frames.decode_hello(body)
            self._server.called |= self._server.matches(self._hello)
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
            raise BrokenFrame("a frame that does not belong to the handshake")

    def _admit(self, hello: Hello, proof: Proof) -> None:
        server = self._server
        transcript = frames.transcript(hello, self._challenge, server.binding)
        if not tags_equal(proof.mac, handshake_proof(server.secret, "caller", transcript)):
            why = "the two sides have different secrets: give both the same TRIPTYCH_SECRET"
            if server.binding:
                why += " (or something between them terminates TLS)"
            self._refuse(why)
        elif not server.matches(hello):
            self._refuse("this address belongs to another incarnation of a worker now")
        else:
            mine = Proof(handshake_proof(server.secret, "worker", transcript))
            self.write(FrameKind.WELCOME, frames.pack(mine))
            self.authenticate(ConnectionKeys(server.secret, "worker", transcript))

    def _refuse(self, reason: str) -> None:
        # A refused frontend tries again every two seconds.
        self._limited.warning("callers_refused", f"refused a caller: {reason}")
        self.write(FrameKind.REFUSED, frames.pack(frames.HandshakeRefused(reason)))
        if self._transport is not None:
            self._transport.close()

    def too_large(self, item: Any) -> Any:
        call, _ = item
        if call in self.replies:
            self.replies[call].close()
        error = EngineFailed(f"An answer is larger than the {frames.MAX_FRAME} bytes of a frame.")
        return call, CallEnd(error.failure())

    def forget(self, call: int) -> None:
        self.replies.pop(call, None)
        self._server.check_drained()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self._server.callers.add(self)

    def on_closed(self, reason: str) -> None:
        self._server.callers.discard(self)
        for reply in list(self.replies.values()):
            reply.close()


class CallServer:
    """Listens for callers and runs ``handler`` in a task for each call."""

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
        self.binding = b""  # fingerprint of its TLS certificate
        self.worker_id = worker_id
        self.epoch = epoch
        self.callers: set[_Caller] = set()
        self.limited = RateLimitedLog(log, "frames_broken", "frames_forged", "callers_refused")
        self.called = False  # whether any caller has reached this incarnation, refused or not
        self._silence = silence
        self._tasks: set[asyncio.Task[None]] = set()
        self._draining = False
        self._idle = asyncio.Event()
        self._listening: PlaneListener | None = None

    async def start(self, host: str, port: int, plane: Plane | None = None) -> str:
        """Listen on a plane (default: tcp). Returns the address for callers."""
        plane = plane or Planes().named("tcp")
        place = ListenAddress(host, port, self.worker_id, self.epoch)
        self._listening = await plane.listen(lambda: _Caller(self, self._silence), place)
        self.binding = self._listening.binding
        return self._listening.address

    async def drain(self, seconds: float) -> bool:
        """Refuse new jobs and wait for the open calls. False: some had not ended in that time.

        GetReport and other requests that are not jobs are still answered.
        """
        self._draining = True
        self.check_drained()
        return await wait_at_most(self._idle, seconds)

    async def close(self) -> None:
        """Stop listening and cancel the open calls: their callers get WorkerLost."""
        if self._listening is not None:
            self._listening.refuse()
        for caller in self.callers:
            for reply in list(caller.replies.values()):
                reply.close()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await asyncio.gather(*(c.close_gracefully("the worker stops") for c in list(self.callers)))
        if self._listening is not None:
            await self._listening.close()

    def open(self, caller: _Caller, call: int, request: WorkerRequest) -> None:
        if self._draining and isinstance(request, Job):
            error = Draining("The worker is stopping and takes no new work. Ask another one.")
            caller.post((call, CallEnd(error.failure())))
            return
        reply = caller.replies[call] = Reply(caller, call)
        self._idle.clear()
        reply.task = asyncio.get_running_loop().create_task(self._serve(request, reply))
        self._tasks.add(reply.task)
        reply.task.add_done_callback(self._tasks.discard)

    def matches(self, hello: Hello) -> bool:
        return (hello.worker, hello.epoch) == (self.worker_id, self.epoch)

    def check_drained(self) -> None:
        """Wake ``drain`` when the last call has ended."""
        if self._draining and not any(caller.replies for caller in self.callers):
            self._idle.set()

    async def _serve(self, request: WorkerRequest, reply: Reply) -> None:
        try:
            await self._handler(request, reply)
        except TriptychError as error:
            reply.end(CallEnd(error.failure()))
        except asyncio.CancelledError:
            # If the caller closed the call, nothing is sent; else the caller learns of it. Not
            # raised again: a task that stores its exception keeps the frames of its traceback,
            # and their memory, until the garbage collector runs.
            reply.end(CallEnd(EngineFailed("The work was cancelled by the worker.").failure()))
        except Exception:  # the worker's boundary: the caller gets an answer whatever happens
            request_id = request.work.id if isinstance(request, Job) else ""
            log.exception("the worker failed at a call", extra={"request_id": request_id})
            why = "The worker failed at this request. Its log has the details."
            reply.end(CallEnd(EngineFailed(why).failure()))
        else:
            reply.end(CallEnd())


def next_answer(waiting: deque[WorkerAnswer]) -> WorkerAnswer:
    """Take the next answer; consecutive Deltas are merged, up to MERGED numbers."""
    answer = waiting.popleft()
    if not isinstance(answer, Delta):
        return answer
    row, size = [answer], _numbers(answer)
    while waiting and isinstance(following := waiting[0], Delta):
        size += _numbers(following)
        if size > MERGED:
            break
        row.append(following)
        waiting.popleft()
    return _merge(row)


def _numbers(delta: Delta) -> int:
    return len(delta.ids) + sum(1 + len(logprob.top) for logprob in delta.logprobs)


def _merge(deltas: list[Delta]) -> Delta:
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
