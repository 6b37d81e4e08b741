"""Text completions that begin with their prompt: ``echo`` of /v1/completions.

``EchoFormat`` adds the prompt to the first output of each choice, whether it is sent whole or as a
stream; ``stream`` and ``completion`` do not know of it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec
from msgspec import UNSET

from triptych.api.responses import (
    ChoiceOutput,
    TextChoice,
    TextCompletion,
    TextCompletionChunk,
    TextFormat,
    TextLogprobs,
)
from triptych.messages import FinishReason, PromptInfo

PromptOf = Callable[[int], PromptInfo | None]  # by index of the choice


class EchoFormat:
    """``texts`` and ``ids``: of the prompt of each choice. ``shows_output`` is False where the
    client asked for no token: then the one that the engine generated is left out."""

    id_prefix = TextFormat.id_prefix
    completion = TextCompletion
    chunk = TextCompletionChunk

    def __init__(
        self,
        plain: TextFormat,
        texts: Sequence[str],
        ids: Sequence[Sequence[int]],
        prompt_of: PromptOf,
        *,
        shows_output: bool,
    ) -> None:
        self._plain = plain
        self._texts = texts
        self._ids = ids
        self._prompt_of = prompt_of
        self._shows_output = shows_output
        self._begun: set[int] = set()

    def choice(self, index: int, output: ChoiceOutput, finish: FinishReason | None) -> TextChoice:
        text = self._texts[index]
        if not self._shows_output:
            output = msgspec.structs.replace(
                output,
                text="",
                ids=UNSET if output.ids is UNSET else (),
                logprobs=None if output.logprobs is None else (),
            )
        made = self._plain.choice(
            index, msgspec.structs.replace(output, offset=output.offset + len(text)), finish
        )
        if index in self._begun:
            return made
        self._begun.add(index)
        return msgspec.structs.replace(
            made, text=text + made.text, logprobs=self._with_prompt(index, made.logprobs)
        )

    chunk_choice = choice

    def first_chunk_choice(self, index: int) -> None:
        return None

    def with_prompt_logprobs(
        self, response: TextCompletion, prompts: Sequence[PromptInfo | None]
    ) -> TextCompletion:
        return self._plain.with_prompt_logprobs(response, prompts)

    def _with_prompt(self, index: int, made: TextLogprobs | None) -> TextLogprobs | None:
        """The log-probabilities of the prompt before those of the output. Nothing precedes the
        first token: it has none."""
        info = self._prompt_of(index)
        if made is None or info is None:
            return made
        ranked = info.logprobs
        tokens = [self._plain.text(self._ids[index][0]), *(self._plain.text(r.id) for r in ranked)]
        offsets, offset = [], 0
        for token in tokens:
            offsets.append(offset)
            offset += len(token)
        return TextLogprobs(
            tokens + made.tokens,
            [None, *(r.logprob for r in ranked), *made.token_logprobs],
            [None, *(self._plain.best(r.id, r.logprob, r.top) for r in ranked), *made.top_logprobs],
            offsets + made.text_offset,
        )
