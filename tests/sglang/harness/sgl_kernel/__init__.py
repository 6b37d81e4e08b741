"""A stand-in for SGLang's compiled kernels, so that SGLang runs on a CPU without them.

The published package is built for GPUs. On a CPU, with its slowest choices (see
``support.sglang_cpu``), SGLang calls one function of it, which is here in torch; whatever else is
asked for raises when it is called, or is declared and never defined. For tests alone: the adapter
knows nothing of it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch import Tensor

# Compiled operators that models name while they are imported, whether they use them or not.
NAMED = (
    "fused_input_proj_cpu",
    "fused_qk_gemma_rmsnorm_cpu",
    "fused_qk_gemma_rmsnorm_with_gate_cpu",
    "fused_qkvzba_split_reshape_cat_contiguous_cpu",
    "fused_sigmoid_mul_cpu",
)
_operators = torch.library.Library("sgl_kernel", "DEF")
for _name in NAMED:
    _operators.define(f"{_name}(Tensor x) -> Tensor")


def assign_req_to_token_pool_cpu(
    rows: Tensor, table: Tensor, starts: Tensor, ends: Tensor, slots: Tensor, _width: int
) -> None:
    """``table[row, start:end]`` takes the next slots, row after row."""
    given = 0
    for row, start, end in torch.stack((rows, starts, ends), dim=1).tolist():
        table[row, start:end] = slots[given : given + end - start].to(table.dtype)
        given += end - start


def __getattr__(name: str) -> Callable[..., Any]:
    if name.startswith("__"):
        raise AttributeError(name)

    def missing(*_args: object, **_options: object) -> NoReturn:
        raise NotImplementedError(f"sgl_kernel.{name} has no stand-in on a CPU")

    return missing
