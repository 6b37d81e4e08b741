"""Tokens, embeddings and KV caches of the fake engine, as pure functions of their input.

The bytes of an embedding repeat the media key and those of a KV cache repeat a digest of the
prompt, so that a reader can verify that it received all of the right ones.
"""

from __future__ import annotations

import hashlib
import re
import struct
from array import array
from collections.abc import Sequence
from typing import Any

import msgspec

from triptych.checkpoint import Model, TokenizerFile
from triptych.messages import (
    MediaMeta,
    MediaSpan,
    PromptLogprob,
    Sampling,
    TokenLogprob,
    TopLogprob,
    Work,
)

BLOCK_SIZE = 16  # tokens in a KV block
BLOCK_BYTES = 4096  # of KV cache that prefill hands over for each block
ROW = 64  # float32 columns of an embedding
DRAW_CHUNK = 64  # tokens drawn from the hash at once

_PRINTABLE = re.compile(r"[Ġ▁]?[A-Za-z0-9,.!?'-]+")


class _Tokenizer(TokenizerFile, frozen=True):
    """With its vocabulary."""

    model: dict[str, Any] = msgspec.field(default_factory=dict)


def printable_ids(model: Model) -> tuple[int, ...]:
    """Token ids that decode to plain text, so that every stream of them is valid UTF-8."""
    special = {*model.end_ids, *model.media_ids.values()}
    file = model.folder / "tokenizer.json"
    if not file.is_file():
        return tuple(i for i in range(model.vocabulary) if i not in special)
    tokenizer = msgspec.json.decode(file.read_bytes(), type=_Tokenizer)
    special.update(token.id for token in tokenizer.added_tokens)
    vocabulary = tokenizer.model.get("vocab", {})
    if isinstance(vocabulary, list):  # Unigram: [[text, score], ...]
        vocabulary = {text: i for i, (text, _) in enumerate(vocabulary)}
    return tuple(
        i
        for text, i in sorted(vocabulary.items(), key=lambda entry: entry[1])
        if i < model.vocabulary and i not in special and _PRINTABLE.fullmatch(text)
    )


def draw_table(ids: Sequence[int]) -> tuple[int, ...]:
    """Maps every 16-bit number to one of the ids."""
    return tuple(ids[i % len(ids)] for i in range(1 << 16))


def draw(seed: bytes, chunk: int, table: Sequence[int]) -> tuple[int, ...]:
    """The tokens at positions ``chunk * CHUNK`` and following."""
    stream = hashlib.shake_128(seed + chunk.to_bytes(8, "little")).digest(2 * DRAW_CHUNK)
    return tuple([table[i] for i in struct.unpack(f"<{DRAW_CHUNK}H", stream)])


def prompt_digest(work: Work, media: Sequence[MediaMeta]) -> bytes:
    digest = hashlib.blake2b(array("q", work.prompt).tobytes(), digest_size=32)
    for item, meta in zip(work.media, media, strict=True):
        digest.update(item.at.to_bytes(8, "little") + meta.key)
    return digest.digest()


def stream_seed(digest: bytes, sampling: Sampling) -> bytes:
    """A greedy stream does not depend on the client's seed."""
    return digest + (f"{sampling.seed}".encode() if sampling.temperature else b"")


def media_tokens(key: bytes) -> int:
    return 16 + key[0] % 49


def embedding_bytes(meta: MediaMeta) -> bytes:
    return meta.key * (meta.tokens * ROW * 4 // len(meta.key))


def fake_kv_bytes(digest: bytes, tokens: int) -> bytes:
    return digest * (blocks_of(tokens) * BLOCK_BYTES // len(digest))


def blocks_of(tokens: int) -> int:
    return -(-tokens // BLOCK_SIZE)


def expanded_prompt(work: Work, media: Sequence[MediaMeta]) -> tuple[int, ...]:
    ids = list(work.prompt)
    for item, meta in sorted(zip(work.media, media, strict=True), key=lambda m: -m[0].at):
        ids[item.at : item.at + 1] = [ids[item.at]] * meta.tokens
    return tuple(ids)


def fake_media_places(work: Work, media: Sequence[MediaMeta]) -> tuple[MediaSpan, ...]:
    """The span of each item in the expanded prompt."""
    places = [MediaSpan(meta.key, 0, meta.tokens) for meta in media]
    added = 0
    for number in sorted(range(len(media)), key=lambda number: work.media[number].at):
        start = work.media[number].at + added
        places[number] = msgspec.structs.replace(places[number], start=start)
        added += media[number].tokens - 1
    return tuple(places)


def logprobs_of(token: int, sampling: Sampling, ids: Sequence[int]) -> tuple[TokenLogprob, ...]:
    """The chosen token always has the best one; the others follow in steps of 1."""
    if sampling.logprobs is None:
        return ()
    top = _ranked(token, sampling.logprobs, ids)
    return (TokenLogprob(_best(token), top),)


def prompt_logprobs_of(
    prompt: Sequence[int], sampling: Sampling, ids: Sequence[int]
) -> tuple[PromptLogprob, ...]:
    """The same for the tokens of a prompt, from the second on."""
    if (count := sampling.prompt_logprobs) is None:
        return ()
    return tuple(PromptLogprob(id, _best(id), 1, _ranked(id, count, ids)) for id in prompt[1:])


def _best(token: int) -> float:
    return -(1 + token % 97) / 128


def _ranked(token: int, count: int, ids: Sequence[int]) -> tuple[TopLogprob, ...]:
    others = [i for i in ids[:count] if i != token]
    best = _best(token)
    return tuple(TopLogprob(i, best - rank) for rank, i in enumerate([token, *others][:count]))
