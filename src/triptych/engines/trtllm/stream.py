"""What came of one request, as deltas: TensorRT-LLM gives all tokens again with each step."""

from __future__ import annotations

import time
from typing import Any

from torch import Tensor

from triptych.engines.base import Generation
from triptych.engines.trtllm import sampling
from triptych.errors import EngineFailed
from triptych.messages import Delta, FinishReason, PromptInfo, TokenLogprob
from triptych.models.layouts import Layout, locate_media

FINISHES: dict[str | None, FinishReason] = {"stop": "stop", "length": "length"}


class TrtStream:
    """One request on its way.

    ``begins``: tokens that prefill made, and it must begin with. ``held``: memory that the engine
    reads before it begins.
    """

    def __init__(self, generation: Generation, layout: Layout) -> None:
        self.begins: list[int] = []
        self.held: tuple[Tensor, ...] = ()
        self.sent = 0
        self.cached = 0
        self._work = generation.work
        self._layout = layout
        metas = [item.meta for item in generation.media]
        self._media = locate_media(layout, generation.work, metas)
        self._told = generation.first.prompt if generation.first else None
        self._began = time.perf_counter()
        self._waits_for = "import" if generation.span == "D" else "prefill"
        self._first = 0.0

    @property
    def begun(self) -> bool:
        return self._first > 0

    @property
    def length(self) -> int:
        return len(self._layout.ids)

    def take(self, result: Any) -> Delta | None:
        """The tokens that are new, and the end if that is reached; None: neither."""
        output = result.outputs[0]
        ids = tuple(output.token_ids[self.sent :])
        finish = _finish(result)
        if not ids and finish is None:
            return None
        if not self.sent and list(ids[: len(self.begins)]) != self.begins[: len(ids)]:
            raise EngineFailed("decode did not begin with the token that prefill made")
        told: tuple[TokenLogprob, ...] = ()
        best = self._work.sampling.logprobs
        if best is not None and ids:
            given = output.logprobs[self.sent : self.sent + len(ids)]
            told = sampling.to_logprobs(ids, given, best)
        prompt: PromptInfo | None = None
        spent: dict[str, float] = {}
        if not self.begun:
            prompt, spent = self.prompt(result), self.spent()
        if finish is not None:
            spent |= {"decode": time.perf_counter() - self._first}
        self.sent += len(ids)
        return Delta(ids, finish, told, prompt, spent or None)

    def prompt(self, result: Any) -> PromptInfo:
        """Prefill's, where another worker did that."""
        if self._told is not None:
            return self._told
        self.cached = min(int(result.cached_tokens or 0), self.length)
        ids = self._layout.ids if self._work.return_prompt_ids else None
        return PromptInfo(self.length, self.cached, ids, self._media)

    def spent(self) -> dict[str, float]:
        """Until it began, which is now."""
        self._first, self.held = time.perf_counter(), ()
        return {self._waits_for: self._first - self._began}


def _finish(result: Any) -> FinishReason | None:
    if not result.finished:
        return None
    reason = result.outputs[0].finish_reason
    if reason not in FINISHES:
        raise EngineFailed(f"TensorRT-LLM ended the request: {reason}")
    return FINISHES[reason]
