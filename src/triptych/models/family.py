"""What the torch engine must know of a model family, and nothing of any one family.

A family is a small description: how its modules are built and where their weights lie in a
checkpoint, how media are prepared and encoded, how placeholders expand and which positions tokens
get. Scheduling, paging and sampling know families only through this door.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor, nn

from triptych.checkpoint import Model
from triptych.media.base import PreparedMedia
from triptych.messages import MediaMeta
from triptych.recipe import Recipes


@dataclass(frozen=True, slots=True)
class LanguageModel:
    """The language half, on its device."""

    model: nn.Module  # (inputs_embeds [1, tokens, hidden], position_ids, ...).last_hidden_state
    embed: nn.Embedding
    head: nn.Linear
    layers: int
    kv_heads: int
    head_dim: int
    hidden: int
    deepstack: int = 0  # layers after which rows of an embedding are added once more


@dataclass(frozen=True, slots=True)
class EmbeddingSpan:
    """A run of placeholders and the rows that stand there: ``rows[row : row + length]``."""

    offset: int  # in Layout.ids
    length: int
    item: int  # index of the media item
    row: int = 0  # of its embedding


@dataclass(frozen=True, slots=True)
class Layout:
    """A prompt as the language model sees it."""

    ids: tuple[int, ...]  # expanded: one placeholder id for each row of an embedding
    spans: tuple[
        EmbeddingSpan, ...
    ]  # in order of offset; an item may have several, with words between
    positions: Tensor  # [axes, tokens] int64
    next_position: int  # of the first generated token; the following ones count up from it
    places: tuple[tuple[int, int], ...] = ()  # of each item: first token, and how many, marks too


class Family(Protocol):
    recipes: Recipes  # what it takes, and how it is prepared
    width: int  # of an embedding row: hidden, and as much again for each deepstack layer

    def build_encoder(self, model: Model) -> nn.Module:
        """Towers and projectors as one module; built inside ``weights.EmptyWeights``."""

    def build_language(self, model: Model) -> nn.Module:
        """Text model and head as one module; built inside ``weights.EmptyWeights``."""

    def weight_name(self, name: str) -> tuple[str, str] | None:
        """A checkpoint's tensor name to ("encoder" | "language", parameter name), None: unused.

        Takes the names of published checkpoints and those that transformers 5 saves.
        """

    def language(self, module: nn.Module, model: Model) -> LanguageModel: ...

    def encode(self, module: nn.Module, batch: Sequence[PreparedMedia]) -> list[Tensor]:
        """Embeddings [tokens, width] of media of one kind, in one forward pass."""

    def layout(
        self, prompt: Sequence[int], at: Sequence[int], media: Sequence[MediaMeta]
    ) -> Layout:
        """Expand the placeholders that stand at ``at``, and give every token its position."""
