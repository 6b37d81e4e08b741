"""Compiles grammars of clients in a process that is killed when one takes too long or too much.

One process at a time, started by the first grammar and replaced after it was killed. Grammars wait
for each other; tenants take turns. Talks to ``grammar_process``.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
from concurrent.futures import ThreadPoolExecutor

import msgspec

from triptych.checkpoint import Model
from triptych.engines.torch.grammar_messages import CheckedGrammar, CheckerSetup, receive, send
from triptych.errors import InvalidSchema, Overloaded, ServiceError, UnsupportedParameter
from triptych.media.lockdown import spawn_clean
from triptych.messages import Grammar
from triptych.runtime.concurrency import FairSemaphore

log = logging.getLogger(__name__)

GRAMMAR_PROCESS = "triptych.engines.torch.grammar_process"
START_SECONDS = 60.0  # until it has read the tokenizer, on a busy machine
MEMORY = 1 << 30  # bytes
WAIT_SECONDS = 10.0  # for other grammars to be compiled; then 429


class CompileAborted(Exception):
    """The process did not finish this grammar. The machine may have been busy, or the process
    killed: the next attempt may succeed."""


class GrammarChecker:
    def __init__(self, model: Model, seconds: float) -> None:
        self._setup = CheckerSetup(str(model.folder), model.end_ids, MEMORY)
        self._seconds = seconds
        self._thread = ThreadPoolExecutor(1, "triptych-checker")
        self._process: _CompilingProcess | None = None
        self._turns = FairSemaphore(1)

    async def check(self, grammar: Grammar, tenant: str) -> str:
        """The grammar as llguidance takes it. Raises InvalidSchema, CompileAborted, or
        UnsupportedParameter if the library cannot read the tokenizer."""
        try:
            async with asyncio.timeout(WAIT_SECONDS):
                await self._turns.acquire(tenant)
        except TimeoutError:
            raise Overloaded("Other grammars are being compiled for too long. Try again.") from None
        loop = asyncio.get_running_loop()
        checking = loop.run_in_executor(self._thread, self._check, grammar)
        # The thread goes on for a caller who leaves, and so does its turn.
        checking.add_done_callback(lambda _: self._turns.release(tenant))
        checked = await asyncio.shield(checking)
        if checked.error:
            raise InvalidSchema(f"The {_name(grammar)} cannot be followed: {checked.error}")
        return checked.source

    def close(self) -> None:
        if self._process is not None:
            self._thread.submit(self._stop)
        self._thread.shutdown(wait=False)

    def _check(self, grammar: Grammar) -> CheckedGrammar:
        try:
            return self._ask(grammar)
        except TimeoutError:
            why = f"it takes more than {self._seconds:g} s to compile. Simplify it."
        except (EOFError, ConnectionError):
            why = "it takes too much memory to compile. Simplify it."
        log.warning("a %s of %d bytes was refused: %s", grammar.kind, len(grammar.text), why)
        self._stop()
        raise CompileAborted(f"The {_name(grammar)} cannot be followed: {why}")

    def _ask(self, grammar: Grammar) -> CheckedGrammar:
        if self._process is not None:
            try:
                return self._process.check(grammar, self._seconds)
            except ConnectionError:  # it died before it had read the grammar
                log.warning("the process that compiles grammars has died; starting another")
                self._stop()
        self._process = _CompilingProcess(self._setup)
        return self._process.check(grammar, self._seconds)

    def _stop(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process = None


class _CompilingProcess:
    """Raises ServiceError if it cannot be started, UnsupportedParameter if it cannot work."""

    def __init__(self, setup: CheckerSetup) -> None:
        self._sock, theirs = socket.socketpair()
        with theirs:
            try:
                environment = {"LD_LIBRARY_PATH": os.environ.get("LD_LIBRARY_PATH", "")}
                self._process = spawn_clean(GRAMMAR_PROCESS, theirs, environment)
            except OSError as error:
                self._sock.close()
                raise ServiceError(
                    "The process that compiles grammars cannot be started. Try again."
                ) from error
        try:
            ready = self._ask(setup, START_SECONDS)
        except (OSError, EOFError) as error:
            self.kill()
            raise ServiceError(
                "The process that compiles grammars did not start. Try again."
            ) from error
        if ready.error:
            self.kill()
            raise UnsupportedParameter(
                f"This model takes no grammars: its tokenizer cannot be read. {ready.error}"
            )

    def check(self, grammar: Grammar, seconds: float) -> CheckedGrammar:
        """Raises TimeoutError, ConnectionError if the process died before it had read the grammar,
        EOFError if it died later."""
        return self._ask(grammar, seconds)

    def _ask(self, message: msgspec.Struct, seconds: float) -> CheckedGrammar:
        self._sock.settimeout(seconds)
        send(self._sock, message)
        return receive(self._sock, CheckedGrammar)

    def kill(self) -> None:
        self._sock.close()
        self._process.kill()
        self._process.wait()


def _name(grammar: Grammar) -> str:
    names = {"json": "JSON schema", "regex": "regular expression", "choice": "list of choices"}
    return names.get(grammar.kind, "grammar")
