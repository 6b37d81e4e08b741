"""What families share to build their torch modules from transformers' classes.

Configurations, a text model with its head, and the names of weights.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

from torch import nn
from transformers import AutoModel, PretrainedConfig

from triptych.errors import UnsupportedModel
from triptych.models.family import LanguageModel


def parse_config(kind: Any, config: dict[str, Any]) -> Any:
    """The content of a config.json as transformers' class, which may change its argument."""
    return kind.from_dict(copy.deepcopy(config))


def stock_text_model(config: PretrainedConfig) -> Any:
    """The text model that transformers has for a configuration."""
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


WeightPrefix = tuple[
    str, str, str
]  # of a stored name; "encoder", "language" or "" (not served); ours

# Buffers that are computed, though old checkpoints store them.
_COMPUTED = (".inv_freq", ".embeddings.position_ids")


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
