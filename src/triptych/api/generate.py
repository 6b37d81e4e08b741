"""From token ids to token ids: the response of /inference/v1/generate, as vLLM has it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
from msgspec import UNSET, UnsetType

from triptych.api.responses import (
    ChatFormat,
    ChoiceOutput,
    GenerateChoice,
    GenerateChunk,
    GenerateResponse,
    Usage,
    rank_tokens,
)
from triptych.messages import FinishReason, PromptInfo


class GenerateFormat:
    """No text, and tokens named by their ids.

    ``request_id``: the client's own; empty: responses show the server's.
    """

    id_prefix = "gen-"

    def __init__(self, request_id: str) -> None:
        self._request_id = request_id
        self._chat = ChatFormat(lambda id: b"token_id:%d" % id)

    def completion(
        self,
        *,
        id: str,
        created: int,
        model: str,
        choices: list[GenerateChoice],
        usage: Usage,
        **unused: Any,  # what other formats show besides
    ) -> GenerateResponse:
        return GenerateResponse(self._request_id or id, model, created, choices, usage)

    def chunk(
        self,
        *,
        id: str,
        choices: list[GenerateChoice],
        usage: Usage | UnsetType | None = UNSET,
        **unused: Any,
    ) -> GenerateChunk:
        return GenerateChunk(self._request_id or id, choices, usage)

    def choice(
        self, index: int, output: ChoiceOutput, finish: FinishReason | None
    ) -> GenerateChoice:
        ids = () if output.ids is UNSET else output.ids
        return GenerateChoice(index, ids, self._chat.logprobs(output.logprobs), finish)

    chunk_choice = choice

    def first_chunk_choice(self, index: int) -> None:
        return None

    def with_prompt_logprobs(
        self, response: GenerateResponse, prompts: Sequence[PromptInfo | None]
    ) -> GenerateResponse:
        ranked = rank_tokens(prompts[0], lambda id: f"token_id:{id}")
        return msgspec.structs.replace(response, prompt_logprobs=ranked)
