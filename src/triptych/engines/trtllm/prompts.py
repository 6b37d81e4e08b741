"""A generation as TensorRT-LLM takes it: prompt, media and what another worker has done of it.

Pictures go to its own processor, which expands the prompt and feeds its tower. Embeddings go by the
door that its own encoder uses: handles to shared memory, with positions that we computed, since
without the media it could only guess them. Either way the ids that it comes to must be those that
all our engines come to, or the request fails.

All of it takes its time and holds the GIL: it runs in one thread, beside the event loop. One,
since torch's way of sharing memory is a global setting that handles are made under.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from PIL import Image
from torch import Tensor

from triptych.engines.adapter import notes
from triptych.engines.base import Generation, Media
from triptych.engines.checks import check_embedding
from triptych.engines.trtllm import handover
from triptych.engines.trtllm.api import TrtApi
from triptych.errors import EngineFailed, InvalidEmbedding, InvalidMedia, InvalidValue
from triptych.models.layouts import EmbeddingSpan, Layout
from triptych.models.tensors import tensor_view

REQUEST_TYPES = {"P": "context_only", "D": "generation_only", "PD": "context_and_generation"}


@dataclass(frozen=True, slots=True)
class TrtPrompt:
    """What ``generate_async`` is called with."""

    inputs: Any  # token ids, or what ``preprocess`` made
    disaggregated: Any  # None: the request is whole here
    held: tuple[Tensor, ...] = ()  # memory that handles point to, until the engine has read it

    @property
    def begins(self) -> list[int]:
        """Tokens that were made already, and the answer begins with."""
        return [] if self.disaggregated is None else self.disaggregated.first_gen_tokens or []


class TrtPromptBuilder:
    """``width``: of an embedding row. ``llm`` is one that is loaded."""

    def __init__(self, api: TrtApi, llm: Any, width: int) -> None:
        self._api = api
        self._llm = llm
        self._width = width
        self._names: dict[bytes, bytes] = {}  # other ones than their keys, of some media

    @property
    def takes_embeddings(self) -> bool:
        """Whether its processor of this model can do without the media."""
        return bool(getattr(self._llm.input_processor, "support_mm_disagg", False))

    def rename(self, media: Sequence[Media]) -> None:
        """What the engine made under the names of these may be of memory that was not theirs."""
        for one in media:
            name = self._names.get(one.meta.key, one.meta.key)
            self._names[one.meta.key] = hashlib.sha256(name).digest()

    def make(self, generation: Generation, span: str, layout: Layout, sampling: Any) -> TrtPrompt:
        """``span``: the generation's, or PD where nothing will be left to hand over."""
        if span == "D":
            return self._decode(generation, layout)
        disaggregated = None
        if span == "P":
            disaggregated = self._api.disaggregated(request_type=REQUEST_TYPES[span])
        if not generation.media:
            return TrtPrompt({"prompt_token_ids": list(layout.ids)}, disaggregated)
        if len({media.encoded for media in generation.media}) > 1:
            raise InvalidValue(
                "TensorRT-LLM takes either files or embeddings in one request", param="messages"
            )
        if not generation.media[0].encoded:
            prompt = TrtPrompt(_shown(generation), disaggregated)
        else:
            prompt = self._embedded(generation, REQUEST_TYPES[span], layout)
        made = self._llm.preprocess(prompt.inputs, sampling, prompt.disaggregated)
        _check(made.prompt_token_ids, layout)
        return replace(prompt, inputs=made)

    def _decode(self, generation: Generation, layout: Layout) -> TrtPrompt:
        """Its prompt is in the KV cache; only the positions of what follows are to be told."""
        disaggregated = handover.unpack_kv_note(self._api, notes.read_note(generation.kv))
        held = self._place(disaggregated, layout) if generation.media else ()
        return TrtPrompt({"prompt_token_ids": list(layout.ids)}, disaggregated, held)

    def _embedded(self, generation: Generation, kind: str, layout: Layout) -> TrtPrompt:
        """A handle for every run of rows: a video with words between its moments has several."""
        if not self.takes_embeddings:
            raise InvalidEmbedding("TensorRT-LLM takes no embeddings of this model; send files")
        whole = [_rows(media, self._width) for media in generation.media]
        runs = [whole[s.item][s.row : s.row + s.length].clone() for s in layout.spans]
        names = [self._names.get(media.meta.key, media.meta.key) for media in generation.media]
        disaggregated = self._api.disaggregated(
            request_type=kind,
            multimodal_embedding_handles=[self._handle(rows) for rows in runs],
            multimodal_hashes=[_digest(names[span.item], span) for span in layout.spans],
        )
        held = self._place(disaggregated, layout)
        text = self._llm.tokenizer.decode(_collapsed(layout))
        return TrtPrompt({"prompt": text}, disaggregated, (*runs, *held))

    def _place(self, disaggregated: Any, layout: Layout) -> tuple[Tensor, ...]:
        """Positions on three axes, where the model has them; others just count."""
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
    """As the sandbox prepared it: of a size that the stock processor leaves as it is."""
    if media.meta.kind != "image":
        raise InvalidMedia(f"TensorRT-LLM is given no {media.meta.kind} files here", param="media")
    return Image.fromarray(tensor_view(media.arrays[0]).numpy())


def _shown(generation: Generation) -> dict[str, Any]:
    return {
        "prompt_token_ids": list(generation.work.prompt),
        "multi_modal_data": {"image": [to_pil_image(media) for media in generation.media]},
        "multi_modal_uuids": {"image": [media.meta.key.hex() for media in generation.media]},
    }


def _rows(media: Media, width: int) -> Tensor:
    check_embedding(media, width)
    return tensor_view(media.arrays[0])


def _digest(name: bytes, span: EmbeddingSpan) -> list[int]:
    """A media key as eight numbers; of a later run of the same item, another one."""
    whole = hashlib.sha256(name + span.row.to_bytes(8, "big")).digest() if span.row else name
    return list(struct.unpack(">8i", whole))


def _collapsed(layout: Layout) -> list[int]:
    """The prompt with one placeholder for every run of rows."""
    ids: list[int] = []
    end = 0
    for span in layout.spans:
        ids += layout.ids[end : span.offset + 1]
        end = span.offset + span.length
    return [*ids, *layout.ids[end:]]


def _check(ids: Sequence[int], layout: Layout) -> None:
    """That the engine's own processor laid the prompt out as we did, whatever it calls a row."""
    same = len(ids) == len(layout.ids)
    end = 0
    for start, stop in [*((s.offset, s.offset + s.length) for s in layout.spans), (None, 0)]:
        same = same and tuple(ids[end:start]) == layout.ids[end:start]
        end = stop
    if not same:
        raise EngineFailed(
            f"TensorRT-LLM reads the prompt as {len(ids)} other tokens than the {len(layout.ids)} "
            "that it has: its tokenizer does not give back what it was given"
        )
