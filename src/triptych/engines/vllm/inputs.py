"""Requests as vLLM's engine takes them: rendered, so that its own processing of media never runs.

An item goes in as what its tower takes, as its embedding, or as its shape alone; a table says for
each family under which names and how vLLM puts several together. Placeholders are expanded by the
family, as for every engine. Identity is the media key.
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
from triptych.engines.adapter.stock import processor_inputs
from triptych.engines.base import Generation, Media
from triptych.engines.checks import check_embedding
from triptych.engines.vllm.connector import EMBEDDING_FIELD
from triptych.errors import InvalidValue, UnsupportedMediaType
from triptych.models import FAMILIES, FieldJoin
from triptych.models.family import Family
from triptych.models.layouts import EmbeddingSpan, Layout
from triptych.models.tensors import tensor_view

# How vLLM joins one field of several items, by the registry's names.
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
    """Of one model."""

    def __init__(self, model: Model, family: Family) -> None:
        self._family = family
        self._recipes = family.recipes
        self._fields = _fields_by_kind(model)
        self._interval = _interval(model, family)

    def lay_out(self, generation: Generation) -> Layout:
        """The prompt as the model sees it, from shapes alone."""
        metas = [item.meta for item in generation.media]
        at = [item.at for item in generation.work.media]
        layout = self._family.layout(generation.work.prompt, at, metas)
        if generation.span in ("P", "D") and _ends_with_media(layout):
            # The last token is computed again by whoever decodes, and there are no rows there.
            raise InvalidValue(
                "Where prefill and decode are apart, vLLM needs words after the last media item.",
                param="messages",
            )
        return layout

    def render(self, generation: Generation, layout: Layout) -> dict[str, Any]:
        """vLLM's rendered input. Arrays that may change later are copied."""
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
        if not meta.sound:
            place = self._place(media, spans, layout)
            return [_Part(meta.kind, name, place, self._item(media))]
        seen, heard = self._with_sound(media)
        whole = self._place(media, spans, layout)
        rows = meta.tokens - meta.sound  # of its frames: they come first
        masks = [torch.zeros(whole.length, dtype=torch.bool) for _ in range(2)]
        for span in spans:
            start = span.offset - whole.offset
            masks[span.row >= rows][start : start + span.length] = True
        return [
            _Part("video", name, PlaceholderRange(whole.offset, whole.length, masks[0]), seen),
            _Part(
                "audio",
                f"{name}:sound",
                PlaceholderRange(whole.offset, whole.length, masks[1]),
                heard,
            ),
        ]

    def _place(
        self, media: Media, spans: Sequence[EmbeddingSpan], layout: Layout
    ) -> PlaceholderRange:
        """Where an item stands: all that the family writes for it, and which of that are rows."""
        first = spans[0]
        if len(spans) == 1 and first.length == media.meta.tokens:
            return PlaceholderRange(first.offset, first.length)
        id = layout.ids[first.offset]
        alone = self._family.layout([id], [0], [media.meta])
        mask = torch.zeros(len(alone.ids), dtype=torch.bool)
        for span in alone.spans:
            mask[span.offset : span.offset + span.length] = True
        return PlaceholderRange(first.offset - alone.spans[0].offset, len(alone.ids), mask)

    def _item(self, media: Media) -> MultiModalKwargsItem:
        fields = self._fields.get(media.meta.kind)
        if fields is None:
            if not media.encoded:
                raise UnsupportedMediaType(f"vLLM's model takes no {media.meta.kind}.")
            fields = {}
        given = processor_inputs(self._recipes, media)
        if media.meta.kind == "video" and self._interval:
            given["second_per_grid_ts"] = torch.tensor([self._interval])
        if "input_audio_features" in fields:
            given = _flat_sound(given, media.meta.tokens)
        item = _item({name: given[name] for name in fields if name in given}, fields)
        if media.encoded and media.arrays:
            item[EMBEDDING_FIELD] = MultiModalFieldElem(
                _rows(media, self._family.width), FIELDS["stack"]
            )
        return item

    def _with_sound(self, media: Media) -> tuple[MultiModalKwargsItem, MultiModalKwargsItem]:
        """A video and its sound, which vLLM takes as two items at one place."""
        meta = media.meta
        given = processor_inputs(self._recipes, media)
        given["second_per_grid_ts"] = torch.tensor([self._interval])
        video = {name: given[name] for name in self._fields["video"] if name in given}
        seen = _item(video, self._fields["video"])
        seen["use_audio_in_video"] = MultiModalFieldElem(torch.tensor(True), FIELDS["stack_on_cpu"])
        heard = _item(_flat_sound(given, meta.sound), self._fields["audio"])
        if media.encoded and media.arrays:
            rows = _rows(media, self._family.width)
            split = meta.tokens - meta.sound
            seen[EMBEDDING_FIELD] = MultiModalFieldElem(rows[:split], FIELDS["stack"])
            heard[EMBEDDING_FIELD] = MultiModalFieldElem(rows[split:], FIELDS["stack"])
        return seen, heard


@dataclass(frozen=True, slots=True)
class _Part:
    """One of vLLM's items: most of ours are one of them."""

    kind: str
    name: str
    place: PlaceholderRange
    item: MultiModalKwargsItem


def _name(media: Media, salt: str) -> str:
    """By which vLLM's caches know an item: its media key. That of KV blocks keeps tenants apart by
    itself, that of embeddings does not."""
    key = media.meta.key.hex()
    return f"{key}:{hashlib.sha256(salt.encode()).hexdigest()[:16]}" if salt else key


def _ends_with_media(layout: Layout) -> bool:
    return bool(layout.spans) and layout.spans[-1].offset + layout.spans[-1].length == len(
        layout.ids
    )


def _item(given: Mapping[str, Tensor], fields: Fields) -> MultiModalKwargsItem:
    """Stock inputs of a batch of one as an item, which has no batch's axis."""
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
    """The embedding, copied: it may lie in memory of another worker."""
    check_embedding(media, width)  # of wrong ones vLLM's engine would end
    return tensor_view(media.arrays[0]).clone()


def _flat_sound(given: Mapping[str, Tensor], tokens: int) -> dict[str, Tensor]:
    """Qwen2.5-Omni's: spectra one after another, and their lengths.

    Where there is no spectrum, a length that has as many tokens: all that positions need.
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
    """Seconds between moments of a video where the stock processor counts them alike; else 0."""
    video = family.recipes.video
    frames = getattr(video, "frames", None)
    if not FAMILIES[model.family].constant_interval or frames is None:
        return 0.0
    return float(frames.patch / frames.fps)
