"""What the torch engine must know of a model family, and nothing of any one family.

A family is a small description: how its modules are built and where their weights lie in a
checkpoint, how pictures become patches, how placeholders expand and which positions tokens get.
Scheduling, paging and sampling know families only through this door.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from torch import Tensor, nn

from triptych.messages import MediaMeta
from triptych.model import Model


@dataclass(frozen=True, slots=True)
class Pixels:
    """One picture, ready for the encoder (result of ``Family.preprocess``)."""

    values: np.ndarray  # float32; Qwen: [patches, channels * t * p * p], LLaVA: [3, height, width]
    grid: tuple[int, ...]  # (t, h, w) in patches, or ()
    tokens: int  # rows of its embedding
    patches: int  # cost in the encoder


@dataclass(frozen=True, slots=True)
class Language:
    """The language half, on its device."""

    model: nn.Module  # (inputs_embeds [1, tokens, hidden], position_ids, ...).last_hidden_state
    embed: nn.Embedding
    head: nn.Linear
    layers: int
    kv_heads: int
    head_dim: int
    hidden: int


@dataclass(frozen=True, slots=True)
class Layout:
    """A prompt as the language model sees it."""

    ids: tuple[int, ...]  # expanded: one placeholder id for each row of an embedding
    spans: tuple[tuple[int, int], ...]  # (offset, length) of each media item in ids
    positions: Tensor  # [axes, tokens] int64
    next_position: int  # of the first generated token; the following ones count up from it


class Family(Protocol):
    hidden: int  # width of an embedding row

    def build_encoder(self, model: Model) -> nn.Module:
        """Vision tower and projector as one module; built inside ``weights.EmptyWeights``."""

    def build_language(self, model: Model) -> nn.Module:
        """Text model and head as one module; built inside ``weights.EmptyWeights``."""

    def weight_name(self, name: str) -> tuple[str, str] | None:
        """A checkpoint's tensor name to ("encoder" | "language", parameter name), None: unused.

        Takes the names of published checkpoints and those that transformers 5 saves.
        """

    def language(self, module: nn.Module, model: Model) -> Language: ...

    def preprocess(self, picture: np.ndarray) -> Pixels:
        """A decoded picture, uint8 [height, width, 3], as the stock processor would do it."""

    def encode(self, module: nn.Module, batch: Sequence[Pixels]) -> list[Tensor]:
        """Embeddings [tokens, hidden] of every picture of the batch, in one forward pass."""

    def layout(
        self, prompt: Sequence[int], at: Sequence[int], media: Sequence[MediaMeta]
    ) -> Layout:
        """Expand the placeholders that stand at ``at``, and give every token its position."""
