"""How the bytes of a ticket get from one NIXL agent to another. All of it in the agent's thread.

On one host the reader READs: the kernel copies, and the owner need not wake. Afterwards it reads
the segments' first pages: a generation is entered once and struck out once, so one that stands
there now has stood there all the time. Between hosts the reader asks and the owner WRITEs, two to
four times as fast over TCP: the owner looks up the generation, holds the memory while it sends,
and tells the checksum of what it sent. Nothing is handed out before that has been compared.

Nothing is tried twice here: who takes a ticket for lost walks again, and then a connection that had
broken is a new one.
"""

from __future__ import annotations

import contextlib
import hmac
import logging
import time
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future

import msgspec

from triptych.transfer.base import aligned_offsets
from triptych.transfer.checksum import checksum
from triptych.transfer.fetching import ReadOperation, ReceiveBuffer, ReceiveOperation, RemoteTensors
from triptych.transfer.nixl_agent import ASLEEP, AT_WORK, NixlAgent, RunningTransfer, broken
from triptych.transfer.segment import PAGE, Memory, Segment, byte_view
from triptych.transfer.shm import OpenTicket
from triptych.transfer.wire import (
    StatusQuery,
    WriteDone,
    WriteRefused,
    WriteRequest,
    decode_message,
    encode_message,
    transfer_deadline,
)

log = logging.getLogger(__name__)
REMEMBERED = 4096  # refusals


class NixlTransfers:
    """Both sides: what we fetch, and what others ask us for. ``find``: the open tickets."""

    def __init__(self, agent: NixlAgent, find: Callable[[int], OpenTicket | None]) -> None:
        self._agent = agent
        self._find = find
        self._refused: OrderedDict[bytes, None] = OrderedDict()
        self._receiving: dict[bytes, ReceiveOperation] = {}
        self._sending: dict[bytes, SendOperation] = {}
        agent.hear = self.hear

    def read(self, source: RemoteTensors, scratch: ReceiveBuffer, done: Future[None]) -> None:
        self._begin(ReadOperation(self._agent, source, scratch, done), source, scratch)

    def ask(
        self, source: RemoteTensors, scratch: ReceiveBuffer, token: bytes, done: Future[None]
    ) -> None:
        operation = ReceiveOperation(self._agent, source, scratch, token, done, self._receiving)
        self._begin(operation, source, scratch)

    def _begin(
        self,
        operation: ReadOperation | ReceiveOperation,
        source: RemoteTensors,
        scratch: ReceiveBuffer,
    ) -> None:
        try:
            self._agent.register(scratch.segment)
            self._agent.meet(source.agent, source.metadata)
            operation.start()
        except Exception as error:  # noqa: BLE001 (NIXL's are of many kinds)
            operation.lose(error)
        self._agent.operations.append(operation)

    def hear(self, sender: str, message: bytes) -> None:
        """What another agent says. It need not be one of ours: anything may stand there."""
        try:
            said = decode_message(message)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            log.warning("a NIXL agent said something that nobody here understands")
            return
        match said:
            case WriteRequest():
                self._send(sender, said)
            case StatusQuery() if said.token not in self._sending:
                self._refuse(sender, said.token, said.metadata)
            case WriteDone() | WriteRefused() if (
                operation := self._receiving.get(said.token)
            ) is not None:
                operation.end(said if isinstance(said, WriteDone) else None)

    def _send(self, reader: str, wanted: WriteRequest) -> None:
        if wanted.token in self._refused or wanted.token in self._sending:
            return
        grant = self._find(wanted.generation)
        held = [] if grant is None else grant.held
        if grant is None or not held or not hmac.compare_digest(held[0][1].nonce, wanted.key):
            self._refuse(reader, wanted.token, wanted.metadata)
            return
        operation = SendOperation(self._agent, self._find, reader, wanted, grant, self._sending)
        try:
            operation.start(held)
        except Exception as error:  # noqa: BLE001
            log.warning("tensors could not be sent: %s", error)
            operation.abort()
            if broken(error):
                self._agent.part(reader)
            self._refuse(reader, wanted.token, wanted.metadata)
            return
        self._agent.operations.append(operation)

    def _refuse(self, reader: str, token: bytes, metadata: bytes) -> None:
        """Say no, and stay with it: what was asked before may come later than the question."""
        self._refused[token] = None
        if len(self._refused) > REMEMBERED:
            self._refused.popitem(last=False)
        with contextlib.suppress(Exception):  # whoever is gone needs no answer
            self._agent.meet(reader, metadata)
            self._agent.tell(reader, encode_message(WriteRefused(token)))


class SendOperation:
    """A WRITE of ours into a reader's scratch. Holds the ticket's memory until it is over."""

    pace = AT_WORK

    def __init__(
        self,
        agent: NixlAgent,
        find: Callable[[int], OpenTicket | None],
        reader: str,
        wanted: WriteRequest,
        grant: OpenTicket,
        register: dict[bytes, SendOperation],
    ) -> None:
        self._agent = agent
        self._find = find
        self._reader = reader
        self._wanted = wanted
        self._grant = grant
        self._register = register
        self._patience = transfer_deadline(sum(r.size for r in wanted.ranges))
        self._checksum = 0
        self._memory: list[Memory] = []
        self._move: RunningTransfer | None = None

    def start(self, held: list[tuple[Memory, Segment]]) -> None:
        ranges = self._wanted.ranges
        for r in ranges:
            if not 0 <= r.piece < len(held) or r.offset < 0 or r.size < 1:
                raise ValueError("a range that no ticket has")
            if r.offset + r.size > held[r.piece][1].capacity:
                raise ValueError("a range that reaches beyond its ticket")
        self._memory = [memory for memory, _ in held]
        bodies = [byte_view(memory)[PAGE:] for memory in self._memory]
        self._checksum = checksum(bodies[r.piece][r.offset : r.offset + r.size] for r in ranges)
        bases = [self._agent.register(segment)[0] + PAGE for _, segment in held]
        here = [(bases[r.piece] + r.offset, r.size, 0) for r in ranges]
        places, _ = aligned_offsets(r.size for r in ranges)
        target = self._wanted.target
        there = [(target + at, r.size, 0) for at, r in zip(places, ranges, strict=True)]
        self._agent.meet(self._reader, self._wanted.metadata)
        self._move = self._agent.start("WRITE", here, there, self._reader)
        self._register[self._wanted.token] = self

    def step(self) -> bool:
        try:
            if self._move is not None and not self._move.done():
                if time.monotonic() > self._patience and self.pace == AT_WORK:
                    self.pace = ASLEEP
                    self._agent.part(self._reader)  # which ends it, one of these times
                return False
            self._answer()
        except Exception as error:  # noqa: BLE001
            log.info("a reader of tensors is gone: %s", error)
            self._agent.part(self._reader)
        self.abort()
        return True

    def _answer(self) -> None:
        token, generation = self._wanted.token, self._wanted.generation
        still = self._find(generation) is self._grant
        answer = WriteDone(token, generation, self._checksum) if still else WriteRefused(token)
        self._agent.tell(self._reader, encode_message(answer))

    def abort(self) -> None:
        self._register.pop(self._wanted.token, None)
        if self._move is not None:
            self._move.release()
        self._memory = []
