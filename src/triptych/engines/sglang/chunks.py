"""What SGLang streams, as deltas. Loads nothing of SGLang."""

from __future__ import annotations

from collections.abc import Mapping
from http import HTTPStatus
from typing import Any

from triptych.engines.adapter.spent import RequestTimer
from triptych.engines.sglang.sampling import stops_after_ignored_eos
from triptych.errors import EngineFailed, Overloaded, TicketLost, TriptychError
from triptych.messages import (
    Delta,
    FinishReason,
    MediaSpan,
    PromptInfo,
    Sampling,
    TokenLogprob,
    TopLogprob,
)

FINISHES: dict[str, FinishReason] = {"stop": "stop", "length": "length"}


class SGLangStream:
    """One stream of them. Where prefill and decode are apart another worker may be the cause of an
    abort."""

    def __init__(
        self,
        sampling: Sampling,
        prompt: tuple[int, ...],
        told: bool,
        span: str,
        media: tuple[MediaSpan, ...] = (),
    ) -> None:
        self._stops = stops_after_ignored_eos(sampling)
        self._logprobs = sampling.logprobs
        self._prompt = prompt
        self._told = told  # whether the client asked for the prompt's ids
        self._media = media
        self._apart = span != "PD"
        self._spent = RequestTimer(span)
        self._begun = False

    def delta(self, chunk: Mapping[str, Any]) -> Delta | None:
        """None: there is nothing new. Raises what an abort was for."""
        meta = chunk["meta_info"]
        ids = tuple(chunk["output_ids"])
        finish = self._finish(meta["finish_reason"])
        for count, id in enumerate(ids, 1):
            if id in self._stops:
                ids, finish = ids[:count], "stop"
                break
        if not ids and finish is None:
            return None
        prompt, spent = None, self._spent.until_now(ended=finish is not None)
        if not self._begun:
            self._begun = True
            told = self._prompt if self._told else None
            cached = int(meta.get("cached_tokens") or 0)
            prompt = PromptInfo(len(self._prompt), cached, told, self._media)
        return Delta(ids, finish, self._ranked(meta, len(ids)), prompt, spent)

    def _ranked(self, meta: Mapping[str, Any], count: int) -> tuple[TokenLogprob, ...]:
        if self._logprobs is None or not count:
            return ()
        chosen = meta["output_token_logprobs"][:count]
        best = (meta.get("output_top_logprobs") or [])[:count] or [()] * count
        return tuple(
            TokenLogprob(own, tuple(TopLogprob(id, value) for value, id, _ in top or ()))
            for (own, _, _), top in zip(chosen, best, strict=True)
        )

    def _finish(self, reason: Mapping[str, Any] | None) -> FinishReason | None:
        if reason is None:
            return None
        if reason["type"] in FINISHES:
            return FINISHES[reason["type"]]
        why = str(reason.get("message") or "SGLang gave no reason")
        raise self.fault(why, reason.get("status_code"))

    def fault(self, why: str, status: int | None = None) -> TriptychError:
        """Whose an abort is that nobody here asked for; ``status``: what SGLang would answer."""
        if status == HTTPStatus.SERVICE_UNAVAILABLE:  # its limits, as the operator has set them
            return Overloaded(f"SGLang has no room for the request: {why}")
        if self._apart:
            return TicketLost(f"The KV cache did not come over: {why}")
        return EngineFailed(f"the request could not be completed: {why}")
