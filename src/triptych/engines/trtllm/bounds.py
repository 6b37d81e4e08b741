"""What a request must fit in, checked before TensorRT-LLM sees it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from triptych.checkpoint import Model
from triptych.engines.base import Generation
from triptych.engines.checks import check_work, max_new_tokens
from triptych.engines.torch.sequence import LayoutFunction
from triptych.errors import ContextLengthExceeded
from triptych.models.layouts import Layout


@dataclass(frozen=True, slots=True)
class PromptLimits:
    context: int  # tokens of a sequence
    prompt: int  # of these, in the longest prompt: the engine may take only one step's worth
    vocabulary: int
    lay_out: LayoutFunction

    @classmethod
    def of(cls, llm: Any, model: Model, lay_out: LayoutFunction) -> PromptLimits:
        step = llm.args.max_num_tokens
        whole = llm.args.enable_chunked_prefill or not step
        longest = model.context if whole else min(model.context, step)
        return cls(model.context, longest, model.vocabulary, lay_out)

    def fit(self, generation: Generation) -> tuple[Layout, int]:
        """The prompt laid out, and how many tokens may be made; or what the client must know."""
        work, metas = generation.work, [item.meta for item in generation.media]
        check_work(generation, self.vocabulary)
        layout = self.lay_out(work.prompt, [item.at for item in work.media], metas)
        length = len(layout.ids)
        if length > self.prompt:
            raise ContextLengthExceeded.of(length, None, self.prompt + 1)
        return layout, max_new_tokens(work, length, self.context)
