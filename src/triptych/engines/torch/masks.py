"""Which tokens the grammars of a step permit, computed in a thread beside the forward pass.

The state of a grammar depends on the generated tokens alone, so the masks of a step can be computed
before its logits exist. The library releases the GIL meanwhile.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from typing import TYPE_CHECKING

import numpy as np

from triptych.engines.torch.sampler import PermittedTokens
from triptych.engines.torch.scheduler import ScheduledStep
from triptych.engines.torch.sequence import Sequence as TokenSequence

if TYPE_CHECKING:
    from llguidance import LLExecutor


class TokenMasker:
    """Computes masks of ``vocabulary`` tokens, the width of the logits. One thread, started by the
    first request with a grammar."""

    def __init__(self, vocabulary: int) -> None:
        self._vocabulary = vocabulary
        self._thread = ThreadPoolExecutor(1, "triptych-masks")

    @contextmanager
    def open(self, step: ScheduledStep) -> Iterator[StepMasks | None]:
        """The masks of a step's sequences; None if none of them has a grammar.

        When the scope ends nothing reads the sequences any more.
        """
        constrained = [s for s in step.decodes if s.matcher is not None]
        constrained += [s for s, new in step.chunks if s.matcher is not None and s.pending == new]
        if not constrained:
            yield None
            return
        tokens = np.zeros((len(constrained), self._vocabulary), bool)
        computing = self._thread.submit(_fill, constrained, tokens)
        try:
            yield StepMasks(constrained, tokens, computing)
        finally:
            wait([computing])

    def close(self) -> None:
        self._thread.shutdown(wait=False)


class StepMasks:
    def __init__(
        self, sequences: list[TokenSequence], tokens: np.ndarray, computing: Future[None]
    ) -> None:
        self._sequences = sequences
        self._tokens = tokens
        self._computing = computing

    def of(self, sampled: Sequence[TokenSequence]) -> PermittedTokens:
        """Wait for the masks, and put them in the order of the sequences that get a token."""
        self._computing.result()
        places = {id(sequence): at for at, sequence in enumerate(sampled)}
        return PermittedTokens([places[id(s)] for s in self._sequences], self._tokens)


@functools.cache
def _executor() -> LLExecutor:
    """With one thread: the forward pass has the others."""
    from llguidance import LLExecutor

    return LLExecutor(1)


def _fill(sequences: list[TokenSequence], tokens: np.ndarray) -> None:
    """One call of the library for all of them, since each would wait for the GIL when it ends."""
    matchers = [s.matcher for s in sequences if s.matcher is not None]
    bits = np.zeros((len(matchers), matchers[0].words), np.int32)
    prepared = [
        (matcher.prepare(sequence.generated), row)
        for row, (matcher, sequence) in enumerate(zip(matchers, sequences, strict=True))
    ]
    _executor().unsafe_compute_mask_ptr(
        prepared, bits.ctypes.data, bits.itemsize * bits.shape[1], len(bits)
    )
    unpacked = np.unpackbits(bits.view(np.uint8), axis=1, bitorder="little")
    size = min(unpacked.shape[1], tokens.shape[1])
    tokens[:, :size] = unpacked[:, :size]
    for matcher, row in zip(matchers, tokens, strict=True):
        matcher.permit(row)
