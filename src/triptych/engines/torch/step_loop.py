"""The step loop, a thread: receive commands, schedule, run, sample, collect.

It alone touches scheduler, pool and KV cache. It passes all results of a step to ``post``, in this
thread, and calls it with an empty list before it waits.

A step that fails runs again, one sequence at a time; sequences that fail alone end in EngineFailed.
When the device no longer answers, or on a bug of ours, ``fatal`` must end the process: the
supervisor starts a new one, and requests continue on other workers.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from triptych.engines.torch.masks import TokenMasker
from triptych.engines.torch.runner import Runner, StepStates
from triptych.engines.torch.sampler import SampledTokens, Sampler, rank_prompt
from triptych.engines.torch.scheduler import ScheduledStep, Scheduler
from triptych.engines.torch.sequence import Sequence
from triptych.errors import EngineFailed, InvalidSchema, PrefixGone, TriptychError
from triptych.messages import Delta, FinishReason, PromptInfo, PromptLogprob, TokenLogprob

StepOutcome = tuple[Sequence, Delta | TriptychError | None]  # None: cancelled on request
LoopCommand = tuple[Callable[[Sequence], None], Sequence]

# Errors that torch and numpy raise for a bad batch or a broken device. Any other is a bug of ours.
FAILURES = (RuntimeError, ValueError, IndexError, MemoryError)

RANKED_AT_ONCE = 64  # tokens of a prompt: their logits are as large as the vocabulary

MEDIA_EVICTED = "Blocks with media of this prompt left the prefix cache. Try again."

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class StepOutput:
    """What a step computed; nothing of it has changed a sequence yet."""

    sequences: list[Sequence]  # that get a token
    chosen: SampledTokens
    ranked: list[tuple[Sequence, list[PromptLogprob]]]  # tokens of prompts, where asked for


class StepLoop:
    def __init__(
        self,
        scheduler: Scheduler,
        runner: Runner,
        sampler: Sampler,
        masker: TokenMasker,
        end_ids: frozenset[int],
        post: Callable[[list[StepOutcome]], None],
        fatal: Callable[[], None],
    ) -> None:
        self._scheduler = scheduler
        self._runner = runner
        self._sampler = sampler
        self._masker = masker
        self._end_ids = end_ids
        self._post = post
        self._fatal = fatal
        self._inbox: queue.SimpleQueue[LoopCommand | None] = queue.SimpleQueue()
        self._idle = True  # the last step had nothing to do: wait for a command
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
        """Free the blocks of the sequence before the next step."""
        self._inbox.put((self._scheduler.drop, sequence))

    def cancel(self, sequence: Sequence) -> None:
        """As ``release``, and post an outcome of None."""
        self._inbox.put((self._cancel, sequence))

    def close(self, seconds: float) -> None:
        """End after the current step; running sequences fail."""
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
                log.critical("the step loop of the torch engine failed", exc_info=True)
                self._fatal()

    def _receive(self) -> bool:
        """Run the received commands; wait for one while idle. False: the loop is closed."""
        while True:
            try:
                message = self._inbox.get(block=self._idle)
            except queue.Empty:
                return True
            if message is None:
                return False
            verb, sequence = message
            verb(sequence)
            self._idle = False

    def _step(self) -> None:
        began = time.perf_counter()
        step = self._scheduler.schedule()
        self._idle = not step
        if step.refused:
            self._post([(sequence, PrefixGone(MEDIA_EVICTED)) for sequence in step.refused])
        if step:
            self._start_placed(step.placed)
            self._post(self._run(step))
            self.counters["steps"] += 1
            self.counters["busy_seconds"] += time.perf_counter() - began
        else:
            self._post([])  # before waiting: new cache events leave with it

    def _start_placed(self, placed: list[Sequence]) -> None:
        imported: list[StepOutcome] = []
        for sequence in placed:
            self._sampler.assign(sequence.row, sequence.sampling, sequence.ids, sequence.prompt)
            if sequence.phases == "D" and not sequence.first:
                # Emitted before the step, so that prefill's memory is free while the step runs.
                sequence.first = time.perf_counter()
                waited = {"import": sequence.first - sequence.arrived}
                imported.append((sequence, Delta((), timings=waited)))
        if imported:
            self._post(imported)

    def _run(self, step: ScheduledStep) -> list[StepOutcome]:
        try:
            output = self._compute(step)
        except FAILURES:
            ids = ", ".join(sequence.request_id for sequence in step.sequences)
            log.exception("a step failed, running its requests one by one: %s", ids)
            self._runner.probe()
            return self._isolate(step)
        return self._collect(step, output)

    def _isolate(self, step: ScheduledStep) -> list[StepOutcome]:
        outcomes: list[StepOutcome] = []
        for part in step.alone():
            try:
                output = self._compute(part)
            except FAILURES:
                self._runner.probe()
                [sequence] = part.sequences
                extra = {"request_id": sequence.request_id}
                log.exception("the model failed on a request", extra=extra)
                outcomes.append(self._fail(sequence, "the model failed on this request"))
            else:
                outcomes += self._collect(part, output)
        return outcomes

    def _compute(self, step: ScheduledStep) -> StepOutput:
        with self._masker.open(step) as masks:  # computed beside the forward pass
            states = self._runner.run(step)
            ranked = self._rank_prompts(states) if states.prompts else []
            sequences = states.sampled
            if not sequences:
                return StepOutput([], SampledTokens([], [], {}), ranked)
            logits: Tensor = self._runner.logits(states.last)
            permitted = None if masks is None else masks.of(sequences)
        rows = [sequence.row for sequence in sequences]
        at = [len(sequence.ids) for sequence in sequences]
        chosen = self._sampler.choose(logits, rows, at, permitted)
        return StepOutput(sequences, chosen, ranked)

    def _rank_prompts(self, states: StepStates) -> list[tuple[Sequence, list[PromptLogprob]]]:
        ranked = []
        for sequence, first, hidden in states.prompts:
            count = sequence.sampling.prompt_logprobs or 0
            found: list[PromptLogprob] = []
            for rows in hidden.split(RANKED_AT_ONCE):
                start = first + len(found)
                ids = sequence.ids[start : start + len(rows)]
                found += rank_prompt(self._runner.logits(rows), ids, count)
            ranked.append((sequence, found))
        return ranked

    def _collect(self, step: ScheduledStep, output: StepOutput) -> list[StepOutcome]:
        chosen = output.chosen
        for sequence, logprobs in output.ranked:
            sequence.prompt_logprobs += logprobs
        for sequence in step.decodes:
            self._scheduler.advance(sequence, 1)
        for sequence, tokens in step.chunks:
            self._scheduler.advance(sequence, tokens)
        now = time.perf_counter()
        outcomes: list[StepOutcome] = []
        for at, sequence in enumerate(output.sequences):
            if sequence.matcher is not None and sequence.matcher.error:
                self._scheduler.drop(sequence)
                outcomes.append((sequence, InvalidSchema(sequence.matcher.error)))
            elif chosen.finite[at]:
                delta = self._take(sequence, chosen.ids[at], chosen.logprobs.get(at), now)
                outcomes.append((sequence, delta))
            else:
                extra = {"request_id": sequence.request_id}
                log.error("the model gave no finite logits", extra=extra)
                self._scheduler.drop_invalid(sequence)
                outcomes.append(self._fail(sequence, "the model gave no finite logits"))
        self.counters["generated_tokens"] += len(outcomes)
        return outcomes

    def _take(
        self, sequence: Sequence, token: int, logprob: TokenLogprob | None, now: float
    ) -> Delta:
        """Add a token to its sequence, which then continues, ends, or waits for its export."""
        sequence.ids.append(token)
        finish = self._finish(sequence, token)
        prompt, spent = None, None
        if not sequence.first:
            prompt, spent = self._begin(sequence, now)
        if finish is not None:
            spent = (spent or {}) | {"decode": now - sequence.first}
        if finish is not None and sequence.trusted:
            self._scheduler.drop(sequence)
        elif finish is not None or sequence.phases == "P":
            self._scheduler.retire(sequence)  # the event loop exports or trusts, then releases it
        return Delta((token,), finish, () if logprob is None else (logprob,), prompt, spent)

    def _begin(self, sequence: Sequence, now: float) -> tuple[PromptInfo, dict[str, float]]:
        """The prompt is complete: release its media."""
        sequence.first, sequence.media = now, ()
        # With the tokens that another worker generated.
        self.counters["prompt_tokens"] += len(sequence.ids) - 1
        self.counters["cached_tokens"] += sequence.cached
        ids = tuple(sequence.ids[: sequence.prompt]) if sequence.return_ids else None
        queued = sequence.started - sequence.arrived
        return (
            PromptInfo(
                sequence.prompt,
                sequence.cached,
                ids,
                sequence.places,
                tuple(sequence.prompt_logprobs),
            ),
            {"queue": queued, "prefill": now - sequence.started},
        )

    def _finish(self, sequence: Sequence, token: int) -> FinishReason | None:
        sampling = sequence.sampling
        if sequence.matcher is not None and sequence.matcher.ends(sequence.generated, token):
            return "stop"
        if token in sampling.stop_token_ids or (token in self._end_ids and not sampling.ignore_eos):
            return "stop"
        return "length" if len(sequence.ids) >= sequence.limit else None

    def _fail(self, sequence: Sequence, why: str) -> StepOutcome:
        self._scheduler.drop(sequence)
        return sequence, EngineFailed(f"the request could not be completed: {why}")

    def _cancel(self, sequence: Sequence) -> None:
        self._scheduler.drop(sequence)
        self._post([(sequence, None)])
