"""One request in TensorRT-LLM's terms: sampling settings, prompt, media, and prefill's note.

Images go to TensorRT-LLM's own processor, which expands the prompt and feeds its tower. Embeddings
go the way of its own encoder: as handles to shared memory, with positions that we compute, because
it can't compute them without the media. In both cases the request fails unless TensorRT-LLM's
token ids are the same as those of all other engines.

This takes time and holds the GIL, so it runs in a thread. In one thread only, because torch's way
of sharing memory is a global setting.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from msgspec import Struct
from PIL import Image
from torch import Tensor

from triptych.engines.adapter.base import (
    SamplingRequest,
    SamplingTable,
    choices_as_ebnf,
    read_note,
    refuse_unless_unset,
    sampling_options,
)
from triptych.engines.base import Generation, Media
from triptych.engines.checks import check_embedding
from triptych.engines.trtllm.api import TrtApi
from triptych.errors import EngineFailed, InvalidEmbedding, InvalidMedia, InvalidValue
from triptych.models.layouts import EmbeddingSpan, Layout
from triptych.models.tensors import tensor_view

REQUEST_TYPES = {"P": "context_only", "D": "generation_only", "PD": "context_and_generation"}


def _if_sampled(field: str) -> Callable[[SamplingRequest], Mapping[str, Any]]:
    """The option of the same name, unless the request is greedy."""

    def option(request: SamplingRequest) -> Mapping[str, Any]:
        sampled = request.sampling.temperature > 0
        return {field: getattr(request.sampling, field)} if sampled else {}

    return option


def _unless(neutral: float, field: str) -> Callable[[SamplingRequest], Mapping[str, Any]]:
    """The option of the same name, unless it is neutral: some samplers refuse unsupported ones."""

    def option(request: SamplingRequest) -> Mapping[str, Any]:
        value = getattr(request.sampling, field)
        return {} if value == neutral else {field: value}

    return option


def _seed(request: SamplingRequest) -> Mapping[str, Any]:
    return {"seed": request.sampling.seed % 2**63} if request.sampling.temperature > 0 else {}


def _logit_bias(request: SamplingRequest) -> Mapping[str, Any]:
    if not request.sampling.logit_bias:
        return {}
    bias = torch.zeros(request.model.vocabulary, dtype=torch.float32)
    for token, value in request.sampling.logit_bias.items():
        bias[token] = value
    return {"embedding_bias": bias}


def _stop_token_ids(request: SamplingRequest) -> Mapping[str, Any]:
    """With the end tokens: ``end_id`` takes only one, and stop tokens stay in the output as with
    every other engine."""
    return {"stop_token_ids": request.stop_ids or None, "include_stop_str_in_output": True}


def _ignore_eos(request: SamplingRequest) -> Mapping[str, Any]:
    """``SamplingRequest.stop_ids`` has the end tokens, or has not."""
    ends = request.model.end_ids
    return {"end_id": -1, "pad_id": ends[0] if ends else 0}


def _logprobs(request: SamplingRequest) -> Mapping[str, Any]:
    count = request.sampling.logprobs
    return {} if count is None else {"logprobs": max(1, count)}  # 0 is not supported by all


def _guided_decoding(request: SamplingRequest) -> Mapping[str, Any]:
    """The fields of TensorRT-LLM's GuidedDecodingParams."""
    grammar = request.sampling.grammar
    if grammar is None:
        return {}
    if grammar.kind == "choice":
        return {"guided_decoding": {"grammar": choices_as_ebnf(grammar)}}
    return {"guided_decoding": {grammar.kind: grammar.text}}


TRT_SAMPLING: SamplingTable = {
    "seed": _seed,
    "max_tokens": lambda request: {"max_tokens": request.max_tokens},
    "temperature": "temperature",
    "top_p": _if_sampled("top_p"),
    "top_k": _if_sampled("top_k"),
    "min_p": _unless(0.0, "min_p"),
    "presence_penalty": _unless(0.0, "presence_penalty"),
    "frequency_penalty": _unless(0.0, "frequency_penalty"),
    "repetition_penalty": _unless(1.0, "repetition_penalty"),
    "logit_bias": _logit_bias,
    "stop_token_ids": _stop_token_ids,
    "ignore_eos": _ignore_eos,
    "logprobs": _logprobs,
    "min_tokens": lambda request: {"min_tokens": request.min_tokens} if request.min_tokens else {},
    "bad_words": refuse_unless_unset("bad_words", "TensorRT-LLM"),
    "allowed_token_ids": refuse_unless_unset("allowed_token_ids", "TensorRT-LLM"),
    "prompt_logprobs": refuse_unless_unset("prompt_logprobs", "TensorRT-LLM"),
    "grammar": _guided_decoding,
}


def trt_sampling_options(request: SamplingRequest) -> dict[str, Any]:
    """The arguments of TensorRT-LLM's SamplingParams. The frontend detokenizes."""
    fixed = {"detokenize": False, "add_special_tokens": False}
    return sampling_options(TRT_SAMPLING, request) | fixed


class TrtKvNote(Struct, frozen=True, forbid_unknown_fields=True):
    """The note from prefill to decode: the fields of DisaggregatedParams that decode needs; None:
    prefill did not set it.

    Handles of a process's memory are left out: decode computes positions itself and needs no
    embedding. TensorRT-LLM's own transceiver moves the KV cache.
    """

    version: str  # of TensorRT-LLM
    first_gen_tokens: list[int]
    opaque_state: bytes | None = None
    ctx_request_id: int | None = None
    disagg_request_id: int | None = None
    draft_tokens: list[int] | None = None
    ctx_dp_rank: int | None = None
    ctx_info_endpoint: str | list[str] | None = None
    # of each first token: [id, log-probability, rank] of the best ones and its own
    first_gen_log_probs: list[list[tuple[int, float, int | None]]] | None = None


LOWEST_LOGPROB = -3.4e38  # JSON has no infinity
PLAIN_FIELDS = (
    "ctx_request_id",
    "disagg_request_id",
    "draft_tokens",
    "ctx_dp_rank",
    "ctx_info_endpoint",
)


def pack_kv_note(api: TrtApi, params: Any) -> TrtKvNote:
    if params is None or not params.first_gen_tokens:
        raise EngineFailed("TensorRT-LLM prefilled a prompt, but returned no first token")
    given = getattr(params, "first_gen_log_probs", None)
    return TrtKvNote(
        version=api.version,
        first_gen_tokens=list(params.first_gen_tokens),
        opaque_state=params.opaque_state,
        first_gen_log_probs=None if given is None else [_logprob_rows(one) for one in given],
        **{name: getattr(params, name, None) for name in PLAIN_FIELDS},
    )


def unpack_kv_note(api: TrtApi, note: TrtKvNote) -> Any:
    """DisaggregatedParams for ``generation_only``."""
    if note.version != api.version:
        raise EngineFailed(
            f"prefill runs TensorRT-LLM {note.version} and decode runs {api.version}: "
            "install the same version"
        )
    # An older version has fewer fields, so those that it did not set are left out.
    fields = {name: value for name in PLAIN_FIELDS if (value := getattr(note, name)) is not None}
    if note.first_gen_log_probs is not None:
        fields["first_gen_log_probs"] = [
            {id: api.logprob(logprob=value, rank=rank) for id, value, rank in rows}
            for rows in note.first_gen_log_probs
        ]
    return api.disaggregated(
        request_type="generation_only",
        first_gen_tokens=note.first_gen_tokens,
        opaque_state=note.opaque_state,
        **fields,
    )


def _logprob_rows(entries: Any) -> list[tuple[int, float, int | None]]:
    return [
        (id, max(LOWEST_LOGPROB, float(entry.logprob)), entry.rank) for id, entry in entries.items()
    ]


@dataclass(frozen=True, slots=True)
class TrtPrompt:
    """The arguments of ``generate_async``."""

    inputs: Any  # token ids, or the output of ``preprocess``
    disaggregated: Any  # DisaggregatedParams; None: this worker prefills and decodes
    memory: tuple[Tensor, ...] = ()  # that handles point to, until the engine has read it

    @property
    def first_ids(self) -> list[int]:
        """Tokens that prefill generated; the answer begins with them."""
        return [] if self.disaggregated is None else self.disaggregated.first_gen_tokens or []


class TrtPromptBuilder:
    """``width``: of an embedding row. ``llm``: a loaded LLM."""

    def __init__(self, api: TrtApi, llm: Any, width: int) -> None:
        self._api = api
        self._llm = llm
        self._width = width
        self._renamed: dict[bytes, bytes] = {}  # identifiers of renamed media, by media key

    @property
    def takes_embeddings(self) -> bool:
        """Whether its processor of this model works without the media."""
        return bool(getattr(self._llm.input_processor, "support_mm_disagg", False))

    def rename(self, media: Sequence[Media]) -> None:
        """Give media new identifiers: the engine may have computed from stale memory of these."""
        for one in media:
            self._renamed[one.meta.key] = hashlib.sha256(self._identifier(one)).digest()

    def _identifier(self, media: Media) -> bytes:
        return self._renamed.get(media.meta.key, media.meta.key)

    def build(
        self, generation: Generation, phases: str, layout: Layout, sampling: Any
    ) -> TrtPrompt:
        """``phases``: the generation's, or PD if there will be nothing to hand over."""
        if phases == "D":
            return self._decode_prompt(generation, layout)
        disaggregated = None
        if phases == "P":
            disaggregated = self._api.disaggregated(request_type=REQUEST_TYPES[phases])
        if not generation.media:
            return TrtPrompt({"prompt_token_ids": list(layout.ids)}, disaggregated)
        if len({media.encoded for media in generation.media}) > 1:
            raise InvalidValue(
                "TensorRT-LLM takes either files or embeddings in one request, not both",
                param="messages",
            )
        if not generation.media[0].encoded:
            prompt = TrtPrompt(_image_inputs(generation), disaggregated)
        else:
            prompt = self._embedding_prompt(generation, REQUEST_TYPES[phases], layout)
        processed = self._llm.preprocess(prompt.inputs, sampling, prompt.disaggregated)
        _check_ids(processed.prompt_token_ids, layout)
        return replace(prompt, inputs=processed)

    def _decode_prompt(self, generation: Generation, layout: Layout) -> TrtPrompt:
        """The prompt is in the KV cache; only the positions of the next tokens are needed."""
        disaggregated = unpack_kv_note(self._api, read_note(generation.kv, TrtKvNote))
        memory = self._set_positions(disaggregated, layout) if generation.media else ()
        return TrtPrompt({"prompt_token_ids": list(layout.ids)}, disaggregated, memory)

    def _embedding_prompt(self, generation: Generation, kind: str, layout: Layout) -> TrtPrompt:
        """A handle for every run of rows: a video with text between its frames has several."""
        if not self.takes_embeddings:
            raise InvalidEmbedding("TensorRT-LLM takes no embeddings for this model; send files")
        whole = [_rows(media, self._width) for media in generation.media]
        runs = [whole[s.item][s.row : s.row + s.length].clone() for s in layout.spans]
        identifiers = [self._identifier(media) for media in generation.media]
        disaggregated = self._api.disaggregated(
            request_type=kind,
            multimodal_embedding_handles=[self._handle(rows) for rows in runs],
            multimodal_hashes=[_digest(identifiers[span.item], span) for span in layout.spans],
        )
        positions = self._set_positions(disaggregated, layout)
        text = self._llm.tokenizer.decode(_collapsed(layout))
        return TrtPrompt({"prompt": text}, disaggregated, (*runs, *positions))

    def _set_positions(self, disaggregated: Any, layout: Layout) -> tuple[Tensor, ...]:
        """Set positions on three axes, if the model has them; positions on one axis just count."""
        if len(layout.positions) != 3:
            return ()
        positions = torch.from_numpy(layout.positions).unsqueeze(1)  # [3, 1, tokens]
        shift = torch.tensor([[layout.next_position - len(layout.ids)]], dtype=torch.int32)
        disaggregated.mrope_position_ids_handle = self._handle(positions)
        disaggregated.mrope_position_deltas_handle = self._handle(shift)
        return positions, shift

    def _handle(self, tensor: Tensor) -> dict[str, Any]:
        handle: dict[str, Any] = self._api.shared.from_tensor(tensor).dump_to_dict()
        return handle


def to_pil_image(media: Media) -> Image.Image:
    """The image in the size that the sandbox prepared; TensorRT-LLM's processor keeps it."""
    if media.meta.kind != "image":
        raise InvalidMedia(f"Engine trtllm takes no {media.meta.kind} files", param="media")
    return Image.fromarray(tensor_view(media.arrays[0]).numpy())


def _image_inputs(generation: Generation) -> dict[str, Any]:
    return {
        "prompt_token_ids": list(generation.work.prompt),
        "multi_modal_data": {"image": [to_pil_image(media) for media in generation.media]},
        "multi_modal_uuids": {"image": [media.meta.key.hex() for media in generation.media]},
    }


def _rows(media: Media, width: int) -> Tensor:
    check_embedding(media, width)
    return tensor_view(media.arrays[0])


def _digest(identifier: bytes, span: EmbeddingSpan) -> list[int]:
    """An identifier as eight integers; later runs of the same item have others."""
    run = hashlib.sha256(identifier + span.row.to_bytes(8, "big")).digest()
    return list(struct.unpack(">8i", run if span.row else identifier))


def _collapsed(layout: Layout) -> list[int]:
    """The prompt with one placeholder for every run of rows."""
    ids: list[int] = []
    end = 0
    for span in layout.spans:
        ids += layout.ids[end : span.offset + 1]
        end = span.offset + span.length
    return [*ids, *layout.ids[end:]]


def _check_ids(ids: Sequence[int], layout: Layout) -> None:
    """Raise unless TensorRT-LLM's processor laid out the same prompt; ids of rows may differ."""
    same = len(ids) == len(layout.ids)
    end = 0
    for start, stop in [*((s.offset, s.offset + s.length) for s in layout.spans), (None, 0)]:
        same = same and tuple(ids[end:start]) == layout.ids[end:start]
        end = stop
    if not same:
        raise EngineFailed(
            f"TensorRT-LLM tokenizes the prompt into {len(ids)} other tokens, not into the "
            f"{len(layout.ids)} of Triptych: its tokenizer does not round-trip"
        )
