"""One request in SGLang's terms: sampling settings, media, and where prefill and decode meet.

SGLang's own preprocessing (decoding, resizing, tokens, hashes) is bypassed: the family lays out the
prompt, and an item brings its identity and an embedding. Positions follow SGLang's own computation,
because the text after a video has other positions in transformers 5.
This is the only module that knows the structs between SGLang's tokenizer and scheduler.
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Sequence
from typing import Annotated, Any

import torch
from msgspec import Meta, Struct
from torch import Tensor

from triptych.engines.adapter.base import (
    SamplingRequest,
    SamplingTable,
    read_note,
    refuse_unless_unset,
    sampling_options,
)
from triptych.engines.adapter.processor_inputs import shape_inputs
from triptych.engines.base import Generation, Media
from triptych.errors import InvalidValue, TicketLost, UnsupportedParameter
from triptych.messages import MediaMeta, Sampling
from triptych.models.family import Family
from triptych.models.layouts import Layout
from triptych.models.tensors import tensor_view
from triptych.transfer.base import Array

MAX_REPETITION_PENALTY = 2.0  # of SGLang
SEED_MASK = (1 << 63) - 1  # SGLang's seeds are signed 64-bit integers
ROOM_BITS = 63  # of a bootstrap room's number
MODALITIES = {"image": "IMAGE", "video": "VIDEO", "audio": "AUDIO"}
LOGPROB_OPTIONS = ("return_logprob", "top_logprobs_num")  # of the request, not of SamplingParams


def _repetition_penalty(request: SamplingRequest) -> dict[str, float]:
    penalty = request.sampling.repetition_penalty
    if penalty > MAX_REPETITION_PENALTY:
        raise InvalidValue(
            f"SGLang takes a repetition_penalty of {MAX_REPETITION_PENALTY:g} at most.",
            param="repetition_penalty",
        )
    return {"repetition_penalty": penalty}


def _logit_bias(request: SamplingRequest) -> dict[str, Any]:
    bias = {str(id): value for id, value in request.sampling.logit_bias.items()}
    return {"logit_bias": bias or None}


def _stop_token_ids(request: SamplingRequest) -> dict[str, list[int]]:
    stops = (*request.model.end_ids, *request.sampling.stop_token_ids)
    return {"stop_token_ids": list(dict.fromkeys(stops))}


def _logprobs(request: SamplingRequest) -> dict[str, Any]:
    count = request.sampling.logprobs
    return {"return_logprob": count is not None, "top_logprobs_num": count or 0}


def _grammar(request: SamplingRequest) -> dict[str, Any]:
    """SGLang compiles grammars with its own tokenizer, which it does not load here
    (--skip-tokenizer-init)."""
    if request.sampling.grammar is not None:
        raise UnsupportedParameter(
            "Engine sglang does not offer structured output: ask for plain text, or serve the "
            "model with engine torch or vllm.",
            param="response_format",
        )
    return {}


SGLANG_SAMPLING: SamplingTable = {
    # SGLang applies a seed in its deterministic mode only (--enable-deterministic-inference).
    "seed": lambda request: {"sampling_seed": request.sampling.seed & SEED_MASK},
    "max_tokens": lambda request: {"max_new_tokens": request.max_tokens},
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": lambda request: {"top_k": request.sampling.top_k or -1},
    "min_p": "min_p",
    "presence_penalty": "presence_penalty",
    "frequency_penalty": "frequency_penalty",
    "repetition_penalty": _repetition_penalty,
    "logit_bias": _logit_bias,
    # SGLang also stops at end tokens that it reads from the checkpoint's files itself. With
    # ignore_eos it ignores stop_token_ids too: see ``stops_after_ignored_eos``.
    "stop_token_ids": _stop_token_ids,
    "ignore_eos": "ignore_eos",
    "logprobs": _logprobs,
    "min_tokens": lambda request: {"min_new_tokens": request.min_tokens},
    "bad_words": refuse_unless_unset("bad_words", "SGLang"),
    "allowed_token_ids": refuse_unless_unset("allowed_token_ids", "SGLang"),
    "prompt_logprobs": refuse_unless_unset("prompt_logprobs", "SGLang"),
    "grammar": _grammar,
}


def sglang_sampling_options(request: SamplingRequest) -> dict[str, Any]:
    """The arguments of a request to SGLang that say how to sample."""
    params = sampling_options(SGLANG_SAMPLING, request)
    logprobs = {name: params.pop(name) for name in LOGPROB_OPTIONS}
    return {"sampling_params": params, **logprobs}


def stops_after_ignored_eos(sampling: Sampling) -> frozenset[int]:
    """The client's stop tokens, if SGLang ignores them: the adapter then stops the stream."""
    return frozenset(sampling.stop_token_ids) if sampling.ignore_eos else frozenset()


class BootstrapAddress(Struct, frozen=True, forbid_unknown_fields=True):
    """Where decode meets prefill: a host name or address, a port, and a room for one request."""

    host: Annotated[str, Meta(max_length=253, pattern=r"^[0-9A-Za-z.:_-]+\Z")]
    port: Annotated[int, Meta(ge=1, le=65535)]
    room: Annotated[int, Meta(ge=0, le=(1 << ROOM_BITS) - 1)]


def new_bootstrap_address(host: str, port: int) -> BootstrapAddress:
    return BootstrapAddress(host, port, secrets.randbits(ROOM_BITS))


def read_bootstrap_address(arrays: Sequence[Array], fake_host: str) -> BootstrapAddress:
    """The address in prefill's note; TicketLost if it is invalid.

    SGLang does not check it: for ``fake_host`` it decodes from a KV cache that was never written.
    If prefill is gone, SGLang notices it and only that request fails.
    """
    address = read_note(arrays, BootstrapAddress)
    if address.host == fake_host:
        raise TicketLost("prefill's note names SGLang's fake host, where nothing was prefilled")
    return address


def copy_embeddings(media: Sequence[Media], dtype: torch.dtype) -> list[Tensor | None]:
    """Embeddings in our own memory and the model's dtype; None for items without arrays.

    The memory that they are copied from may be gone after the first emit.
    """
    return [
        tensor_view(item.arrays[0]).to(dtype, copy=True) if item.arrays else None for item in media
    ]


def scheduler_inputs(
    generation: Generation,
    layout: Layout,
    family: Family,
    embeddings: Sequence[Tensor | None],
    processor: Any,
) -> Any:
    """The MultimodalProcessorOutput that SGLang's own ``processor`` of the model would return."""
    from sglang.srt.managers.schedule_batch import MultimodalProcessorOutput

    ids = list(layout.ids)
    items = [
        _item(media, layout, number, family, embedding, generation.work.salt)
        for number, (media, embedding) in enumerate(zip(generation.media, embeddings, strict=True))
    ]
    output = MultimodalProcessorOutput(
        mm_items=items,
        input_ids=ids,
        padded_input_ids=MultimodalProcessorOutput.build_padded_input_ids(ids, items),
    )
    if layout.positions.shape[0] == 3:  # positions on one axis just count
        metas = [item.meta for item in generation.media]
        output.mrope_positions, output.mrope_position_delta = _positions(processor, ids, metas)
    return output


def drop_embeddings(output: Any) -> None:
    """Free the embeddings: the scheduler has a copy, and SGLang's client keeps its arguments until
    the stream ends."""
    for item in output.mm_items:
        item.precomputed_embeddings = None


def _positions(
    processor: Any, ids: Sequence[int], metas: Sequence[MediaMeta]
) -> tuple[Tensor, Tensor]:
    """The positions of all tokens on three axes, and the offset of the following ones."""
    from sglang.srt.layers.rotary_embedding import MRotaryEmbedding

    images = [meta.grid for meta in metas if meta.kind == "image"]
    videos = [meta for meta in metas if meta.kind == "video"]
    positions, delta = MRotaryEmbedding.get_rope_index(
        spatial_merge_size=processor.spatial_merge_size,
        image_token_id=processor.mm_tokens.image_token_id,
        video_token_id=processor.mm_tokens.video_token_id,
        vision_start_token_id=processor.vision_start_token_id,
        model_type=processor.model_type,
        tokens_per_second=processor._tokens_per_second,
        input_ids=torch.tensor([ids]),
        image_grid_thw=torch.tensor(images) if images else None,
        video_grid_thw=torch.tensor([video.grid for video in videos]) if videos else None,
        second_per_grid_ts=torch.tensor([_step(video) for video in videos]) if videos else None,
    )
    return positions.squeeze(1), delta


def _step(video: MediaMeta) -> float:
    """Seconds between temporal patches; a single patch needs none."""
    return video.times[1] - video.times[0] if len(video.times) > 1 else 1.0


def _item(
    media: Media,
    layout: Layout,
    number: int,
    family: Family,
    embedding: Tensor | None,
    salt: str,
) -> Any:
    from sglang.srt.managers.schedule_batch import Modality, MultimodalDataItem

    item = MultimodalDataItem(
        modality=Modality[MODALITIES[media.meta.kind]],
        offsets=[
            (span.offset, span.offset + span.length - 1)
            for span in layout.spans
            if span.item == number
        ],
        precomputed_embeddings=embedding,
    )
    for name, value in shape_inputs(family.recipes, media.meta).items():
        item.set(name, value)
    if media.meta.kind == "audio":
        item.audio_feature_lens = torch.tensor([media.meta.tokens])
    item.set_identity(media.meta.key)  # part of the hash of KV blocks, beside the salt
    if salt:
        item.hash = salted_hash(media.meta.key, salt)
    return item


def salted_hash(key: bytes, salt: str) -> int:
    """The key of an item in SGLang's embedding cache, which does not keep tenants apart itself."""
    return int.from_bytes(hashlib.sha256(salt.encode() + b"\0" + key).digest()[:8], "big")
