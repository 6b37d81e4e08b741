"""One tiny checkpoint with both its halves, and prompts with media of any kind.

Media come prepared: what a sandbox does with files is tested elsewhere.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch

import reference
from support.torch_engine import Bench, frozen
from triptych.engines.base import Media
from triptych.engines.torch import weights
from triptych.media.base import PreparedMedia
from triptych.messages import MediaItem, MediaMeta, Sampling, Work


def ready(meta: MediaMeta, array: np.ndarray, cost: int = 1) -> PreparedMedia:
    """An item as the decode pool gives it, with its media key."""
    key = hashlib.sha256(array.tobytes() + repr(meta).encode()).digest()
    meta = msgspec.structs.replace(meta, key=key)
    return PreparedMedia(meta, (frozen(torch.from_numpy(array)),), cost)


class Mixed(Bench):
    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.tower = weights.load_part(self.family, self.model, "encoder", "cpu", torch.float32)

    def encode(self, items: Sequence[PreparedMedia]) -> list[torch.Tensor]:
        """Rows of every item, those of one kind in one batch."""
        rows: dict[int, torch.Tensor] = {}
        for kind in {item.meta.kind for item in items}:
            places = [at for at, item in enumerate(items) if item.meta.kind == kind]
            with torch.inference_mode():
                batch = self.family.encode(self.tower, [items[at] for at in places])
            rows |= dict(zip(places, batch, strict=True))
        return [rows[at] for at in range(len(items))]

    def places(self, prompt: Sequence[int]) -> list[int]:
        taken = set(self.model.media_ids.values())
        return [at for at, id in enumerate(prompt) if id in taken]

    def ask(
        self, prompt: Sequence[int], items: Sequence[PreparedMedia], **sampling: Any
    ) -> tuple[Work, tuple[Media, ...]]:
        """Items stand at the placeholders of the prompt, in order."""
        chosen = Sampling(**{"seed": 1, "temperature": 0.0, "max_tokens": 12, **sampling})
        media = tuple(
            MediaItem(item.meta.kind, at, b"")
            for at, item in zip(self.places(prompt), items, strict=True)
        )
        work = Work("w", tuple(prompt), media, chosen, return_prompt_ids=True)
        rows = self.encode(items)
        encoded = zip(items, rows, strict=True)
        return work, tuple(Media(item.meta, (frozen(each),)) for item, each in encoded)

    def expect(
        self, prompt: Sequence[int], items: Sequence[PreparedMedia], inputs: dict[str, Any]
    ) -> reference.Reference:
        """What stock transformers answers; ``inputs`` are those of its own processors."""
        metas = [item.meta for item in items]
        layout = self.family.layout(prompt, self.places(prompt), metas)
        return reference.generate(self.folder, layout.ids, max_tokens=12, inputs=inputs)
