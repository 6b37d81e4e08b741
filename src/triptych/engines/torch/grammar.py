"""Grammars of the torch engine: compiled once, and followed by each sequence on its own.

The library is llguidance. A compiled grammar is cached by its text. ``GrammarChecker`` compiles
every new one first, in a process that it may kill: a short schema can take the library minutes, or
all memory. What passes there is compiled again here, in a thread.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import numpy as np

from triptych.checkpoint import Model
from triptych.engines.torch.grammar_checker import CompileAborted, GrammarChecker
from triptych.errors import InvalidSchema, RequestError
from triptych.messages import Grammar, Sampling
from triptych.runtime.caching import LRUCache, SingleFlight

if TYPE_CHECKING:
    from llguidance import LLMatcher

CACHED_GRAMMARS = 256
CACHED_BYTES = 16 << 20  # of their texts


class GrammarMatcher:
    """Where one sequence is in its grammar: a function of the tokens that it has generated.

    So it needs no part in a handover, a preemption or a resumed request: the tokens are consumed
    once more.
    """

    def __init__(
        self, matcher: LLMatcher, end_ids: Sequence[int], words: int, *, ignore_eos: bool
    ) -> None:
        self.error = ""  # for the client: the grammar cannot be followed any further
        self._matcher = matcher
        self._end_ids = frozenset(end_ids)
        self._ends = np.array(sorted(end_ids), np.int64)
        self.words = words  # of 32 bits in a mask: a bit for each token
        self._ignore_eos = ignore_eos
        self._consumed = 0

    def prepare(self, generated: Sequence[int]) -> LLMatcher:
        """The library's matcher after these tokens, to compute the mask of the next one with."""
        self._consume(generated)
        return self._matcher

    def permit(self, row: np.ndarray) -> None:
        """Change ``row`` [vocabulary], the computed mask, to the tokens that may follow.

        An end token may follow where the text is complete; with ``ignore_eos`` only if nothing else
        may. On an error all of them are set, and the token that is sampled means nothing.
        """
        if not self.error and self._matcher.is_error():
            self._fail()
        if self.error:
            row[:] = True
        elif self._ignore_eos and row.sum() > row[self._ends].sum():
            row[self._ends] = False

    def ends(self, generated: Sequence[int], token: int) -> bool:
        """Whether the text ends with ``token``, the last of ``generated``: it is an end token, or
        nothing may follow it."""
        if token in self._end_ids:
            return True
        self._consume(generated)
        return not self.error and self._matcher.is_stopped()

    def _consume(self, generated: Sequence[int]) -> None:
        new = generated[self._consumed :]
        self._consumed = len(generated)
        if new and not self.error and not self._matcher.consume_tokens(list(new)):
            self._fail()

    def _fail(self) -> None:
        why = self._matcher.get_error().partition("\n")[0]
        self.error = f"The grammar cannot be followed beyond {self._consumed} tokens: {why}"


class _CompiledGrammar:
    """A grammar that matchers are copied from, or the error of one that is not valid."""

    def __init__(self, matcher: LLMatcher | None, error: RequestError | None = None) -> None:
        self.matcher = matcher
        self.error = error


class GrammarCompiler:
    """Starts nothing before the first grammar: most servers never get one."""

    def __init__(self, model: Model, seconds: float) -> None:
        self._checker = GrammarChecker(model, seconds)
        self._model = model
        self._tokenizer: Any = None
        self._cache: LRUCache[Grammar, _CompiledGrammar] = LRUCache(
            CACHED_BYTES, most=CACHED_GRAMMARS
        )
        self._flights: SingleFlight[_CompiledGrammar] = SingleFlight()
        self._thread = ThreadPoolExecutor(1, "triptych-grammar")

    async def matcher(self, sampling: Sampling, salt: str = "") -> GrammarMatcher:
        """A matcher at the start of the sampling's grammar. ``salt``: of the work, it names the
        tenant. Raises InvalidSchema."""
        grammar = sampling.grammar
        assert grammar is not None
        compiled = self._cache.get(grammar)
        if compiled is None:
            tenant = salt.partition("\n")[0]  # the client chooses the rest of the salt
            compiled = await self._flights.join(
                (tenant, grammar), lambda: self._compile(grammar, tenant)
            )
        if compiled.matcher is None:
            assert compiled.error is not None
            raise type(compiled.error)(compiled.error.message)
        tokenizer = self._tokenizer
        return GrammarMatcher(
            compiled.matcher.deep_copy(),
            tokenizer.eos_tokens,
            -(-tokenizer.vocab_size // 32),
            ignore_eos=sampling.ignore_eos,
        )

    async def _compile(self, grammar: Grammar, tenant: str) -> _CompiledGrammar:
        try:
            source = await self._checker.check(grammar, tenant)
            loop = asyncio.get_running_loop()
            matcher = await loop.run_in_executor(self._thread, self._build, source, grammar.kind)
            compiled = _CompiledGrammar(matcher)
        except CompileAborted as error:  # not cached
            raise InvalidSchema(str(error)) from None
        except RequestError as error:  # cached too: a client may send it again
            compiled = _CompiledGrammar(None, error)
        self._cache.put(grammar, compiled, len(grammar.text.encode()) + 1)
        return compiled

    def _build(self, source: str, kind: str) -> LLMatcher:
        from triptych.engines.torch.grammar_process import build_matcher, load_tokenizer

        if self._tokenizer is None:
            self._tokenizer = load_tokenizer(str(self._model.folder), self._model.end_ids)
        matcher = build_matcher(self._tokenizer, source, kind)
        if matcher.is_error():
            raise InvalidSchema(matcher.get_error())
        return matcher

    def close(self) -> None:
        self._checker.close()
        self._thread.shutdown(wait=False)
