"""The interface of a model family.

A family says how its media are prepared and encoded, how placeholders expand, which positions
tokens get, how its torch modules are built and where their weights lie in a checkpoint. Scheduling,
paging and sampling know families only through this interface. Building torch modules belongs to
the torch engine and stays here for now.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor, nn

from triptych.checkpoint import Model
from triptych.media.base import PreparedMedia
from triptych.messages import MediaMeta
from triptych.models.layouts import Layout
from triptych.recipe import Recipes


@dataclass(frozen=True, slots=True)
class LanguageModel:
    """A text model with its head, on its device."""

    model: nn.Module  # (inputs_embeds [1, tokens, hidden], position_ids, ...).last_hidden_state
    embed: nn.Embedding
    head: nn.Linear
    layers: int
    kv_heads: int
    head_dim: int
    hidden: int
    deepstack: int = 0  # layers after which rows of an embedding are added once more


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
