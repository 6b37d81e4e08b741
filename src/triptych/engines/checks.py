"""Checks of a request that every engine makes before it computes, with the same messages."""

from __future__ import annotations

from collections.abc import Iterable

from triptych import models
from triptych.checkpoint import Model
from triptych.engines.base import Generation, Media
from triptych.errors import ContextLengthExceeded, EngineFailed, InvalidValue, UnsupportedModel
from triptych.media.base import PreparedMedia
from triptych.messages import Work
from triptych.transfer.base import byte_count


def check_family(engine: str, model: Model) -> None:
    """Refuse a checkpoint that this engine does not serve."""
    served = models.served_by(engine)
    if model.family not in served:
        raise UnsupportedModel(
            f"model_type '{model.family}' of {model.name} is not served by engine {engine}; it "
            f"serves {', '.join(served)}. Choose another engine (--engine): docs/engines.md says "
            "which engine serves which model."
        )


def check_work(generation: Generation, vocabulary: int) -> None:
    """Refuse token ids outside the vocabulary, and missing media."""
    work, media = generation.work, generation.media
    if len(media) != len(work.media):
        raise EngineFailed(f"{len(work.media)} media items, but {len(media)} were encoded")
    if not work.prompt or not 0 <= min(work.prompt) <= max(work.prompt) < vocabulary:
        raise InvalidValue(f"token ids must be from 0 to {vocabulary - 1}", param="prompt")
    sampling = work.sampling
    for param, tokens in (
        ("logit_bias", sampling.logit_bias),
        ("allowed_token_ids", sampling.allowed_token_ids),
        ("bad_words", [token for word in sampling.bad_words for token in word]),
    ):
        if tokens and not 0 <= min(tokens) <= max(tokens) < vocabulary:
            raise InvalidValue(f"{param} ids must be from 0 to {vocabulary - 1}", param=param)


def check_item_length(items: Iterable[PreparedMedia], context: int) -> None:
    """Refuse an item that fits in no prompt: a video can have a hundred times as many rows."""
    for item in items:
        if item.meta.tokens >= context:
            raise ContextLengthExceeded.of(item.meta.tokens, None, context)


def check_embedding(media: Media, width: int) -> None:
    """Refuse an embedding that does not have one row for each of its tokens."""
    shapes = [array.shape for array in media.arrays]
    whole = all(a.buffer.nbytes == byte_count(a.dtype, a.shape) for a in media.arrays)
    if not media.encoded or shapes != [(media.meta.tokens, width)] or not whole:
        raise EngineFailed(
            f"an embedding must have shape {(media.meta.tokens, width)}, and has {shapes}"
        )


def max_new_tokens(work: Work, prompt: int, context: int) -> int:
    """How many tokens may follow a prompt of this length."""
    left, asked = context - prompt, work.sampling.max_tokens
    most = left if asked is None else asked
    if not 1 <= most <= left:
        raise ContextLengthExceeded.of(prompt, asked, context)
    return most
