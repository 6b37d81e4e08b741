"""A model family: the base class of all of them, and what they share to build torch modules.

A family says how its media are prepared and encoded, how placeholders expand, which positions
tokens get, how its torch modules are built and where their weights lie in a checkpoint. Scheduling,
paging and sampling know families only through this class. Building torch modules belongs to the
torch engine and stays here for now.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor, nn

from triptych.errors import UnsupportedModel
from triptych.media.base import PreparedMedia
from triptych.messages import MediaMeta
from triptych.models.layouts import Layout, sequential_layout
from triptych.recipe import Recipes

# Of a stored name; "encoder", "language" or "" (not served); of our name.
WeightPrefix = tuple[str, str, str]

# Buffers that are computed, though old checkpoints store them.
_COMPUTED = (".inv_freq", ".embeddings.position_ids")


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


class Family:
    """A subclass sets the attributes and adds ``build_encoder`` and ``encode``; it overrides the
    other methods where the family differs."""

    prefixes: ClassVar[Sequence[WeightPrefix]] = ()  # of its weights: see ``map_weight_name``
    config: Any  # the checkpoint's, as transformers' class
    recipes: Recipes  # what it takes, and how it is prepared
    width: int  # of an embedding row: hidden, and as much again for each deepstack layer

    def build_encoder(self) -> nn.Module:
        """Towers and projectors as one module; built inside ``weights.EmptyWeights``."""
        raise NotImplementedError

    def build_language(self) -> nn.Module:
        """Text model and head as one module; built inside ``weights.EmptyWeights``."""
        config = copy.deepcopy(self.config.text_config)
        return CausalLM(config, tied=getattr(self.config, "tie_word_embeddings", False))

    def weight_name(self, name: str) -> tuple[str, str] | None:
        """A checkpoint's tensor name to ("encoder" | "language", parameter name), None: unused.

        Takes the names of published checkpoints and those that transformers 5 saves.
        """
        return map_weight_name(name, self.prefixes)

    def language(self, module: nn.Module) -> LanguageModel:
        """The parts of ``build_language``'s module that the engine calls."""
        return describe_language_model(module)

    def encode(self, module: nn.Module, batch: Sequence[PreparedMedia]) -> list[Tensor]:
        """Embeddings [tokens, width] of media of one kind, in one forward pass."""
        raise NotImplementedError

    def layout(
        self, prompt: Sequence[int], at: Sequence[int], media: Sequence[MediaMeta]
    ) -> Layout:
        """Expand the placeholders that stand at ``at``, and give every token its position."""
        return sequential_layout(prompt, at, media)


def parse_config(kind: Any, config: dict[str, Any]) -> Any:
    """The content of a config.json as transformers' class, which may change its argument."""
    return kind.from_dict(copy.deepcopy(config))


def stock_text_model(config: Any) -> Any:
    """The text model that transformers has for a configuration."""
    from transformers import AutoModel

    return AutoModel.from_config(config, attn_implementation="sdpa")


class CausalLM(nn.Module):
    """Text model and head. Parameter names: ``model.*`` and ``lm_head.weight``."""

    def __init__(
        self, config: Any, *, tied: bool, build: Callable[[Any], Any] = stock_text_model
    ) -> None:
        super().__init__()
        if "sliding_attention" in (getattr(config, "layer_types", None) or ()):
            raise UnsupportedModel(
                "sliding-window attention in the language model is not supported"
            )
        self.model: Any = build(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        if tied:
            self.lm_head.weight = self.model.embed_tokens.weight


def describe_language_model(module: nn.Module, deepstack: int = 0) -> LanguageModel:
    assert isinstance(module, CausalLM)
    config = module.model.config
    heads = config.num_attention_heads
    return LanguageModel(
        model=module.model,
        embed=module.model.embed_tokens,
        head=module.lm_head,
        layers=config.num_hidden_layers,
        kv_heads=getattr(config, "num_key_value_heads", None) or heads,
        head_dim=getattr(config, "head_dim", None) or config.hidden_size // heads,
        hidden=config.hidden_size,
        deepstack=deepstack,
    )


def map_weight_name(name: str, prefixes: Sequence[WeightPrefix]) -> tuple[str, str] | None:
    """Part and parameter name of a stored tensor, by the first prefix that matches.

    Without a match it belongs to the language part, under its own name.
    """
    if name.endswith(_COMPUTED):
        return None
    for prefix, part, renamed in prefixes:
        if name.startswith(prefix):
            return (part, renamed + name.removeprefix(prefix)) if part else None
    return "language", name


def with_outer_prefix(
    prefixes: Sequence[WeightPrefix], outer: str = "model."
) -> tuple[WeightPrefix, ...]:
    """The same prefixes with and without an outer one, which transformers 5 may save."""
    return tuple((outer + name, part, own) for name, part, own in prefixes) + tuple(prefixes)
