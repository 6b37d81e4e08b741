"""The step loop: take what came in, schedule, run, sample, collect; in a thread of its own.

It alone touches scheduler, pool and pages. Results leave by ``post``, all of a step at once; it is
called in this thread, and also when there are none.

A step that fails is run again, one sequence at a time, and those that fail alone end in
EngineFailed. When the device itself no longer answers, or the loop meets an error that is our own,
``fatal`` must end the process: its supervisor starts a new one, and requests go on elsewhere.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable

import torch
from torch import Tensor

from triptych.engines.torch.runner import Runner
from triptych.engines.torch.sampler import SampledTokens, Sampler
from triptych.engines.torch.scheduler import ScheduledStep, Scheduler
from triptych.engines.torch.sequence import Sequence
from triptych.errors import EngineFailed, PrefixEvicted, TriptychError
from triptych.messages import Delta, FinishReason, PromptInfo, TokenLogprob

StepOutcome = tuple[Sequence, Delta | TriptychError | None]  # None: dropped, as was asked for
LoopCommand = tuple[Callable[[Sequence], None], Sequence]

# What torch and numpy raise when they cannot do what they are asked: the batch is to blame, or the
# device. Anything else is an error of ours.
FAILURES = (RuntimeError, ValueError, IndexError, MemoryError)

MEDIA_EVICTED = "What stands for media of this prompt is not in the cache any more. Try again."

log = logging.getLogger(__name__)


class StepLoop:
    def __init__(
        self,
        scheduler: Scheduler,
        runner: Runner,
        sampler: Sampler,
        end_ids: frozenset[int],
        post: Callable[[list[StepOutcome]], None],
        fatal: Callable[[], None],
    ) -> None:
        self._scheduler = scheduler
        self._runner = runner
        self._sampler = sampler
        self._end_ids = end_ids
        self._post = post
        self._fatal = fatal
        self._inbox: queue.SimpleQueue[LoopCommand | None] = queue.SimpleQueue()
        self._stuck = True  # the last step had nothing to do: wait until something comes
        self._closing = False
        self.counters = dict.fromkeys(
            ("steps", "prompt_tokens", "cached_tokens", "generated_tokens", "busy_seconds"), 0.0
        )
        self._thread = threading.Thread(target=self._serve, name="triptych-step", daemon=True)
        self._thread.start()

    @property
    def alive(self) -> bool:
        return self._thread.is_alive() and not self._closing

    def add(self, sequence: Sequence) -> None:
        self._inbox.put((self._scheduler.add, sequence))

    def trust(self, sequence: Sequence) -> None:
        self._inbox.put((self._scheduler.trust, sequence))

    def release(self, sequence: Sequence) -> None:
        """Free what the sequence holds, before the next step."""
        self._inbox.put((self._scheduler.drop, sequence))

    def cancel(self, sequence: Sequence) -> None:
        """As ``release``, and post when it is done."""
        self._inbox.put((self._cancel, sequence))

    def close(self, seconds: float) -> None:
        """End after the step under way; what still runs fails."""
        self._closing = True
        self._inbox.put(None)
        self._thread.join(seconds)

    def _serve(self) -> None:
        try:
            with torch.inference_mode():
                while self._receive():
                    self._step()
            left = [*self._scheduler.running, *self._scheduler.waiting]
            self._post([self._fail(sequence, "the engine was closed") for sequence in left])
        finally:
            if not self._closing:
                log.critical("the step loop of the torch engine broke", exc_info=True)
                self._fatal()

    def _receive(self) -> bool:
        """Take in what has come, or wait for it while there is nothing to do."""
        while True:
            try:
                message = self._inbox.get(block=self._stuck)
            except queue.Empty:
                return True
            if message is None:
                return False
            verb, sequence = message
            verb(sequence)
            self._stuck = False

    def _step(self) -> None:
        began = time.perf_counter()
        step = self._scheduler.schedule()
        self._stuck = not step
        if step.refused:
            self._post([(sequence, PrefixEvicted(MEDIA_EVICTED)) for sequence in step.refused])
        if step:
            self._welcome(step.placed)
            self._post(self._run(step))
            self.counters["steps"] += 1
            self.counters["busy_seconds"] += time.perf_counter() - began
        else:
            self._post([])  # before we wait: what is new of the cache leaves with it

    def _welcome(self, placed: list[Sequence]) -> None:
        imported: list[StepOutcome] = []
        for sequence in placed:
            self._sampler.assign(sequence.row, sequence.sampling, sequence.ids, sequence.prompt)
            if sequence.span == "D" and not sequence.first:
                # Told before the step, so that prefill's memory is free while the step runs.
                sequence.first = time.perf_counter()
                waited = {"import": sequence.first - sequence.arrived}
                imported.append((sequence, Delta((), timings=waited)))
        if imported:
            self._post(imported)

    def _run(self, step: ScheduledStep) -> list[StepOutcome]:
        try:
            sequences, chosen = self._compute(step)
        except FAILURES:
            log.exception("a step of %d sequences failed", len(step.sequences))
            self._runner.probe()
            return self._isolate(step)
        return self._collect(step, sequences, chosen)

    def _isolate(self, step: ScheduledStep) -> list[StepOutcome]:
        outcomes: list[StepOutcome] = []
        for part in step.alone():
            try:
                sequences, chosen = self._compute(part)
            except FAILURES:
                self._runner.probe()
                outcomes += [self._fail(s, "the model failed on it") for s in part.sequences]
            else:
                outcomes += self._collect(part, sequences, chosen)
        return outcomes

    def _compute(self, step: ScheduledStep) -> tuple[list[Sequence], SampledTokens]:
        sequences, hidden = self._runner.run(step)
        if not sequences:
            return [], SampledTokens([], [], {})
        logits: Tensor = self._runner.logits(hidden)
        rows = [sequence.row for sequence in sequences]
        return sequences, self._sampler.choose(logits, rows, [len(s.ids) for s in sequences])

    def _collect(
        self, step: ScheduledStep, sequences: list[Sequence], chosen: SampledTokens
    ) -> list[StepOutcome]:
        for sequence in step.decodes:
            self._scheduler.advance(sequence, 1)
        for sequence, tokens in step.chunks:
            self._scheduler.advance(sequence, tokens)
        now = time.perf_counter()
        outcomes: list[StepOutcome] = []
        for at, sequence in enumerate(sequences):
            if chosen.finite[at]:
                delta = self._take(sequence, chosen.ids[at], chosen.logprobs.get(at), now)
                outcomes.append((sequence, delta))
            else:
                self._scheduler.distrust(sequence)
                outcomes.append(self._fail(sequence, "the model gave no numbers for it"))
        self.counters["generated_tokens"] += len(outcomes)
        return outcomes

    def _take(
        self, sequence: Sequence, token: int, logprob: TokenLogprob | None, now: float
    ) -> Delta:
        """Add a token to its sequence, which goes on, ends, or waits for its export."""
        sequence.ids.append(token)
        finish = self._finish(sequence, token)
        prompt, spent = None, None
        if not sequence.first:
            prompt, spent = self._begin(sequence, now)
        if finish is not None:
            spent = (spent or {}) | {"decode": now - sequence.first}
        if finish is not None and sequence.trusted:
            self._scheduler.drop(sequence)
        elif finish is not None or sequence.span == "P":
            self._scheduler.retire(sequence)  # the event loop exports or trusts, then releases it
        return Delta((token,), finish, () if logprob is None else (logprob,), prompt, spent)

    def _begin(self, sequence: Sequence, now: float) -> tuple[PromptInfo, dict[str, float]]:
        """The prompt is done: its media are needed no more."""
        sequence.first, sequence.media = now, ()
        self.counters["prompt_tokens"] += len(sequence.ids) - 1  # with what was made elsewhere
        self.counters["cached_tokens"] += sequence.cached
        ids = tuple(sequence.ids[: sequence.prompt]) if sequence.return_ids else None
        queued = sequence.started - sequence.arrived
        return (
            PromptInfo(sequence.prompt, sequence.cached, ids, sequence.places),
            {"queue": queued, "prefill": now - sequence.started},
        )

    def _finish(self, sequence: Sequence, token: int) -> FinishReason | None:
        sampling = sequence.sampling
        if token in sampling.stop_token_ids or (token in self._end_ids and not sampling.ignore_eos):
            return "stop"
        return "length" if len(sequence.ids) >= sequence.limit else None

    def _fail(self, sequence: Sequence, why: str) -> StepOutcome:
        self._scheduler.drop(sequence)
        return sequence, EngineFailed(f"the request could not be completed: {why}")

    def _cancel(self, sequence: Sequence) -> None:
        self._scheduler.drop(sequence)
        self._post([(sequence, None)])
