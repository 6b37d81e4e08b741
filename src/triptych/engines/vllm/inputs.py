"""Requests as vLLM's rendered inputs, so that vLLM does not preprocess media itself.

An item enters as its tower's input, as its embedding, or as its shape alone; the registry of
families says under which names and how vLLM batches them. The family expands the placeholders, as
for every engine. vLLM identifies an item by its media key.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch
from torch import Tensor
from vllm.multimodal.inputs import (
    BaseMultiModalField,
    MultiModalBatchedField,
    MultiModalFieldElem,
    MultiModalFlatField,
    MultiModalKwargsItem,
    PlaceholderRange,
)

from triptych.checkpoint import Model
from triptych.engines.adapter.processor_inputs import processor_inputs
from triptych.engines.base import Generation, Media
from triptych.engines.checks import check_embedding
from triptych.engines.vllm.connector import EMBEDDING_FIELD
from triptych.errors import InvalidValue, UnsupportedMediaType
from triptych.models import FAMILIES, FieldJoin
from triptych.models.family import Family
from triptych.models.layouts import EmbeddingSpan, Layout
from triptych.models.tensors import tensor_view

# How vLLM batches a field of several items, by the registry's names.
FIELDS: dict[FieldJoin, BaseMultiModalField] = {
    "stack": MultiModalBatchedField(),
    "stack_on_cpu": MultiModalBatchedField(keep_on_cpu=True),
    "concatenate": MultiModalFlatField(slices=[slice(None)]),
    "concatenate_in_time": MultiModalFlatField(slices=[slice(None)], dim=1),
}
Fields = Mapping[str, BaseMultiModalField]


def _fields_by_kind(model: Model) -> dict[str, Fields]:
    """The inputs of vLLM's model by kind of media."""
    named = FAMILIES[model.family].vllm_fields
    assert named is not None, f"vLLM does not serve {model.family}"
    return {
        kind: {name: FIELDS[join] for name, join in fields.items()}
        for kind, fields in named.items()
    }


class VllmInputs:
    """The rendered inputs of one model."""

    def __init__(self, model: Model, family: Family) -> None:
        self.family = family
        self._recipes = family.recipes
        self._fields = _fields_by_kind(model)
        self._interval = _interval(model, family)

    def check(self, generation: Generation, layout: Layout) -> None:
        """Refuse a prompt that vLLM cannot decode in another worker than the one that prefills."""
        if generation.phases in ("P", "D") and _ends_with_media(layout):
            # The decode worker computes the last token again, and has no embeddings.
            raise InvalidValue(
                "With prefill and decode in separate workers, vLLM needs text after the last media "
                "item.",
                param="messages",
            )

    def render(self, generation: Generation, layout: Layout) -> dict[str, Any]:
        """vLLM's rendered input. Copies arrays that may change later."""
        inputs: dict[str, Any] = {"type": "token", "prompt_token_ids": list(layout.ids)}
        if generation.work.salt:
            inputs["cache_salt"] = generation.work.salt
        if not generation.media:
            return inputs
        kwargs: dict[str, list[MultiModalKwargsItem]] = {}
        hashes: dict[str, list[str]] = {}
        places: dict[str, list[PlaceholderRange]] = {}
        for number, spans in groupby(layout.spans, key=lambda span: span.item):
            media = generation.media[number]
            name = _name(media, generation.work.salt)
            for part in self._parts(media, name, list(spans), layout):
                kwargs.setdefault(part.kind, []).append(part.item)
                hashes.setdefault(part.kind, []).append(part.name)
                places.setdefault(part.kind, []).append(part.place)
        return inputs | {
            "type": "multimodal",
            "mm_kwargs": kwargs,
            "mm_hashes": hashes,
            "mm_placeholders": places,
        }

    def _parts(
        self, media: Media, name: str, spans: Sequence[EmbeddingSpan], layout: Layout
    ) -> list[_Part]:
        meta = media.meta
        if not meta.audio_tokens:
            place = self._place(media, spans, layout)
            return [_Part(meta.kind, name, place, self._item(media))]
        video, audio = self._video_and_audio(media)
        whole = self._place(media, spans, layout)
        rows = meta.tokens - meta.audio_tokens  # of its frames: they come first
        masks = [torch.zeros(whole.length, dtype=torch.bool) for _ in range(2)]
        for span in spans:
            start = span.offset - whole.offset
            masks[span.row >= rows][start : start + span.length] = True
        return [
            _Part("video", name, PlaceholderRange(whole.offset, whole.length, masks[0]), video),
            _Part(
                "audio",
                f"{name}:sound",
                PlaceholderRange(whole.offset, whole.length, masks[1]),
                audio,
            ),
        ]

    def _place(
        self, media: Media, spans: Sequence[EmbeddingSpan], layout: Layout
    ) -> PlaceholderRange:
        """All tokens that the family writes for an item, and which of them are embedding rows."""
        first = spans[0]
        if len(spans) == 1 and first.length == media.meta.tokens:
            return PlaceholderRange(first.offset, first.length)
        id = layout.ids[first.offset]
        alone = self.family.layout([id], [0], [media.meta])
        mask = torch.zeros(len(alone.ids), dtype=torch.bool)
        for span in alone.spans:
            mask[span.offset : span.offset + span.length] = True
        return PlaceholderRange(first.offset - alone.spans[0].offset, len(alone.ids), mask)

    def _item(self, media: Media) -> MultiModalKwargsItem:
        fields = self._fields.get(media.meta.kind)
        if fields is None:
            if not media.encoded:
                raise UnsupportedMediaType(f"vLLM's model does not take {media.meta.kind}.")
            fields = {}
        given = processor_inputs(self._recipes, media)
        if media.meta.kind == "video" and self._interval:
            given["second_per_grid_ts"] = torch.tensor([media.meta.interval or self._interval])
        if "input_audio_features" in fields:
            given = _flat_audio(given, media.meta.tokens)
        item = _item({name: given[name] for name in fields if name in given}, fields)
        if media.encoded and media.arrays:
            item[EMBEDDING_FIELD] = MultiModalFieldElem(
                _rows(media, self.family.width), FIELDS["stack"]
            )
        return item

    def _video_and_audio(self, media: Media) -> tuple[MultiModalKwargsItem, MultiModalKwargsItem]:
        """A video and its sound, which are two items of vLLM with the same tokens."""
        meta = media.meta
        given = processor_inputs(self._recipes, media)
        given["second_per_grid_ts"] = torch.tensor([media.meta.interval or self._interval])
        shown = {name: given[name] for name in self._fields["video"] if name in given}
        video = _item(shown, self._fields["video"])
        video["use_audio_in_video"] = MultiModalFieldElem(
            torch.tensor(True), FIELDS["stack_on_cpu"]
        )
        audio = _item(_flat_audio(given, meta.audio_tokens), self._fields["audio"])
        if media.encoded and media.arrays:
            rows = _rows(media, self.family.width)
            split = meta.tokens - meta.audio_tokens
            video[EMBEDDING_FIELD] = MultiModalFieldElem(rows[:split], FIELDS["stack"])
            audio[EMBEDDING_FIELD] = MultiModalFieldElem(rows[split:], FIELDS["stack"])
        return video, audio


@dataclass(frozen=True, slots=True)
class _Part:
    """One of vLLM's items. A video with sound is two, every other item of ours is one."""

    kind: str
    name: str
    place: PlaceholderRange
    item: MultiModalKwargsItem


def _name(media: Media, salt: str) -> str:
    """vLLM's identifier of an item: its media key, and the salt: vLLM's encoder cache, unlike its
    KV cache, does not keep tenants apart."""
    key = media.meta.key.hex()
    return f"{key}:{hashlib.sha256(salt.encode()).hexdigest()[:16]}" if salt else key


def _ends_with_media(layout: Layout) -> bool:
    return bool(layout.spans) and layout.spans[-1].offset + layout.spans[-1].length == len(
        layout.ids
    )


def _item(given: Mapping[str, Tensor], fields: Fields) -> MultiModalKwargsItem:
    """Processor inputs of a batch of one as an item, which has no batch axis."""
    return MultiModalKwargsItem(
        {
            name: MultiModalFieldElem(
                tensor[0] if isinstance(fields[name], MultiModalBatchedField) else tensor,
                fields[name],
            )
            for name, tensor in given.items()
        }
    )


def _rows(media: Media, width: int) -> Tensor:
    """A copy of the embedding, which may be in another worker's memory."""
    check_embedding(media, width)  # a wrong shape would end vLLM's engine
    return tensor_view(media.arrays[0]).clone()


def _flat_audio(given: Mapping[str, Tensor], tokens: int) -> dict[str, Tensor]:
    """Qwen2.5-Omni's audio: concatenated spectra and their lengths.

    Without a spectrum, a length that gives as many tokens: positions need no more.
    """
    if "input_features" not in given:
        return {"audio_feature_lengths": torch.tensor([4 * tokens])}
    spectrum = given["input_features"][0]
    return {
        "input_audio_features": spectrum,
        "audio_feature_lengths": torch.tensor([spectrum.shape[1]]),
        "feature_attention_mask": given["feature_attention_mask"],
    }


def _interval(model: Model, family: Family) -> float:
    """Seconds between a video's temporal patches, if the processor takes them as equal; else 0."""
    video = family.recipes.video
    frames = getattr(video, "frames", None)
    if not FAMILIES[model.family].constant_interval or frames is None:
        return 0.0
    return float(frames.patch / frames.fps)
