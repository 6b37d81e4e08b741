"""The language half as families share it: a text model of transformers and its head."""

from __future__ import annotations

from typing import Any

from torch import nn
from transformers import AutoModel, PretrainedConfig

from triptych.engines.torch.family import Language
from triptych.errors import UnsupportedModel


class TextPart(nn.Module):
    """Text model and head. Parameter names: ``model.*`` and ``lm_head.weight``."""

    def __init__(self, config: PretrainedConfig, *, tied: bool) -> None:
        super().__init__()
        if "sliding_attention" in (getattr(config, "layer_types", None) or ()):
            raise UnsupportedModel(
                "sliding-window attention in the language model is not supported"
            )
        self.model: Any = AutoModel.from_config(config, attn_implementation="sdpa")
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        if tied:
            self.lm_head.weight = self.model.embed_tokens.weight


def describe(module: nn.Module) -> Language:
    assert isinstance(module, TextPart)
    config = module.model.config
    heads = config.num_attention_heads
    return Language(
        model=module.model,
        embed=module.model.embed_tokens,
        head=module.lm_head,
        layers=config.num_hidden_layers,
        kv_heads=getattr(config, "num_key_value_heads", None) or heads,
        head_dim=getattr(config, "head_dim", None) or config.hidden_size // heads,
        hidden=config.hidden_size,
    )
