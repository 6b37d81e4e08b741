"""Media as SGLang's scheduler takes them.

SGLang's own preprocessing (decoding, resizing, tokens, hashes) is left out: the family lays out the
prompt, and an item brings its identity and an embedding. Positions are by SGLang's own reckoning:
the words after a clip stand elsewhere in transformers 5.
This is the one module that knows the structs between SGLang's tokenizer and scheduler.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from triptych.engines.adapter.stock import shape_inputs
from triptych.engines.base import Generation, Media
from triptych.messages import MediaMeta
from triptych.models.family import Family
from triptych.models.layouts import Layout
from triptych.models.tensors import tensor_view

MODALITIES = {"image": "IMAGE", "video": "VIDEO", "audio": "AUDIO"}


def copy_embeddings(media: Sequence[Media], dtype: torch.dtype) -> list[Tensor | None]:
    """Embeddings in memory of our own and the model's dtype; None where decode needs none. What
    they are copied from may be taken back after the first emit."""
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
    """A MultimodalProcessorOutput: what SGLang's own ``processor`` of the model would have made."""
    from sglang.srt.managers.schedule_batch import MultimodalProcessorOutput

    ids = list(layout.ids)
    items = [
        _item(media, layout, number, family, embedding, generation.work.salt)
        for number, (media, embedding) in enumerate(zip(generation.media, embeddings, strict=True))
    ]
    made = MultimodalProcessorOutput(
        mm_items=items,
        input_ids=ids,
        padded_input_ids=MultimodalProcessorOutput.build_padded_input_ids(ids, items),
    )
    if layout.positions.shape[0] == 3:  # where they just count nothing is to be told
        metas = [item.meta for item in generation.media]
        made.mrope_positions, made.mrope_position_delta = _positions(processor, ids, metas)
    return made


def drop_embeddings(made: Any) -> None:
    """Of embeddings: the scheduler has its own by now, and SGLang's client keeps what it was given
    until the stream ends."""
    for item in made.mm_items:
        item.precomputed_embeddings = None


def _positions(
    processor: Any, ids: Sequence[int], metas: Sequence[MediaMeta]
) -> tuple[Tensor, Tensor]:
    """Of all tokens on three axes, and how far those to come lie from their index."""
    from sglang.srt.layers.rotary_embedding import MRotaryEmbedding

    pictures = [meta.grid for meta in metas if meta.kind == "image"]
    clips = [meta for meta in metas if meta.kind == "video"]
    positions, delta = MRotaryEmbedding.get_rope_index(
        spatial_merge_size=processor.spatial_merge_size,
        image_token_id=processor.mm_tokens.image_token_id,
        video_token_id=processor.mm_tokens.video_token_id,
        vision_start_token_id=processor.vision_start_token_id,
        model_type=processor.model_type,
        tokens_per_second=processor._tokens_per_second,
        input_ids=torch.tensor([ids]),
        image_grid_thw=torch.tensor(pictures) if pictures else None,
        video_grid_thw=torch.tensor([clip.grid for clip in clips]) if clips else None,
        second_per_grid_ts=torch.tensor([_step(clip) for clip in clips]) if clips else None,
    )
    return positions.squeeze(1), delta


def _step(clip: MediaMeta) -> float:
    """Seconds between two moments; of a single one nobody asks."""
    return clip.times[1] - clip.times[0] if len(clip.times) > 1 else 1.0


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
    item.set_identity(media.meta.key)  # by which KV blocks are known, within a tenant's salt
    if salt:
        item.hash = salted_hash(media.meta.key, salt)
    return item


def salted_hash(key: bytes, salt: str) -> int:
    """By which SGLang's cache of embeddings knows an item: that one does not know of salts."""
    return int.from_bytes(hashlib.sha256(salt.encode() + b"\0" + key).digest()[:8], "big")
