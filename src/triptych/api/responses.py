"""How answers look on the wire: chat completions and plain completions, whole and in chunks.

A shape makes bytes from finished facts and keeps no state of a stream. The chunk of a plain token
is made elsewhere from ``before`` and ``after``, which hold everything but its text.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import msgspec
from msgspec import Struct

from triptych.messages import FinishReason, PromptInfo, TokenLogprob

encode = msgspec.json.Encoder().encode
TokenBytes = Callable[[int], bytes]
_TEXT = "\x00"  # where a chunk's text goes in a template


class ScoredToken(Struct, frozen=True):
    """A token with its log-probability."""

    id: int
    logprob: TokenLogprob


class ChoiceDelta(Struct, frozen=True):
    """New text of a choice, and what the client asked to hear of its tokens."""

    text: str
    ids: Sequence[int] | None = None
    scored: Sequence[ScoredToken] | None = None
    start: int = 0  # characters of the choice before this piece
    prompt_ids: Sequence[int] | None = None  # told once


class CompletionFormat(Protocol):
    def choice(
        self, index: int, piece: ChoiceDelta, finish: FinishReason | None
    ) -> dict[str, Any]: ...

    def delta(
        self, index: int, piece: ChoiceDelta, finish: FinishReason | None
    ) -> dict[str, Any]: ...

    def opening(self, index: int) -> dict[str, Any] | None:
        """What a stream says before the first text of a choice."""

    whole: str
    chunk: str
    prefix: str  # of ids


def _extra(piece: ChoiceDelta) -> dict[str, Any]:
    return {} if piece.ids is None else {"token_ids": list(piece.ids)}


class ChatFormat:
    """Chat completions."""

    whole = "chat.completion"
    chunk = "chat.completion.chunk"
    prefix = "chatcmpl-"

    def __init__(self, token_bytes: TokenBytes) -> None:
        self._bytes = token_bytes

    def choice(self, index: int, piece: ChoiceDelta, finish: FinishReason | None) -> dict[str, Any]:
        return {
            "index": index,
            "message": {"role": "assistant", "content": piece.text},
            "logprobs": self._logprobs(piece.scored),
            "finish_reason": finish,
            **_extra(piece),
        }

    def delta(self, index: int, piece: ChoiceDelta, finish: FinishReason | None) -> dict[str, Any]:
        told = piece.text or piece.ids or piece.scored
        return {
            "index": index,
            "delta": {"content": piece.text} if told else {},
            "logprobs": self._logprobs(piece.scored),
            "finish_reason": finish,
            **_extra(piece),
        }

    def opening(self, index: int) -> dict[str, Any] | None:
        delta = {"role": "assistant", "content": ""}
        return {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}

    def _logprobs(self, scored: Sequence[ScoredToken] | None) -> dict[str, Any] | None:
        if scored is None:
            return None
        content = [
            self._token(token.id, token.logprob.logprob)
            | {"top_logprobs": [self._token(top.id, top.logprob) for top in token.logprob.top]}
            for token in scored
        ]
        return {"content": content, "refusal": None}

    def _token(self, id: int, logprob: float) -> dict[str, Any]:
        raw = self._bytes(id)
        return {"token": raw.decode(errors="replace"), "logprob": logprob, "bytes": list(raw)}


class TextFormat:
    """Completions of a plain prompt."""

    whole = "text_completion"
    chunk = "text_completion"
    prefix = "cmpl-"

    def __init__(self, token_bytes: TokenBytes) -> None:
        self._bytes = token_bytes

    def choice(self, index: int, piece: ChoiceDelta, finish: FinishReason | None) -> dict[str, Any]:
        told = {} if piece.prompt_ids is None else {"prompt_token_ids": list(piece.prompt_ids)}
        return {
            "index": index,
            "text": piece.text,
            "logprobs": self._logprobs(piece),
            "finish_reason": finish,
            **_extra(piece),
            **told,
        }

    delta = choice

    def opening(self, index: int) -> dict[str, Any] | None:
        return None

    def _logprobs(self, piece: ChoiceDelta) -> dict[str, Any] | None:
        if piece.scored is None:
            return None
        tokens = [self._text(token.id) for token in piece.scored]
        offsets, at = [], piece.start
        for token in tokens:
            offsets.append(at)
            at += len(token)
        return {
            "tokens": tokens,
            "token_logprobs": [token.logprob.logprob for token in piece.scored],
            "top_logprobs": [
                {self._text(top.id): top.logprob for top in token.logprob.top}
                for token in piece.scored
            ],
            "text_offset": offsets,
        }

    def _text(self, id: int) -> str:
        return self._bytes(id).decode(errors="replace")


def sum_usage(prompts: Sequence[PromptInfo], completion: int) -> dict[str, Any]:
    prompt = sum(info.tokens for info in prompts)
    cached = sum(info.cached for info in prompts)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": cached},
    }


def sse_event(content: Mapping[str, Any]) -> bytes:
    """One server-sent event."""
    return b"data: " + encode(content) + b"\n\n"


def chunk_template(envelope: Mapping[str, Any], choice: dict[str, Any]) -> tuple[bytes, bytes]:
    """What stands before and after the text in the chunk of a plain token."""
    whole = sse_event({**envelope, "choices": [choice]})
    before, after = whole.split(encode(_TEXT), 1)
    return before, after


TEMPLATE_DELTA = ChoiceDelta(_TEXT)
