"""Linear layers with weights packed for the fastest matrix product on a CPU.

oneDNN lays weights out in blocks once, whereas ``nn.Linear`` works on plain rows in every call: a
batch of some tens of tokens, as in decoding, takes about two thirds of the time. Small layers stay
as they are, since calling oneDNN costs more than it saves there. Knows no model.

oneDNN compiles and caches code for every number of rows, half a megabyte and some milliseconds
each: so rows are padded to one of a few numbers.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

LEAST_WEIGHTS = 1 << 17  # a layer with fewer weights is not packed
EXACT_ROWS = 16  # up to so many rows are never padded
STEPS_PER_DOUBLING = 8  # row counts per power of two: padding adds at most an eighth


class PackedLinear(nn.Module):
    """Computes what ``nn.Linear`` does. ``weight`` has dtype and device, but no readable values.

    It flattens its inputs from dimension ``start`` on: a convolution whose kernel covers its whole
    input is a linear layer too.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None, start: int) -> None:
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self.weight: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight)
        self.bias = bias
        self._start = start

    def forward(self, x: Tensor) -> Tensor:
        x = x.flatten(self._start)
        *leading, _ = x.shape
        rows = math.prod(leading)
        flat = x.reshape(rows, self.in_features)
        if added := padded_rows(rows) - rows:
            flat = nn.functional.pad(flat, (0, 0, 0, added))
        y: Tensor = torch.ops.mkldnn._linear_pointwise(flat, self.weight, self.bias, "none", [], "")
        return y[:rows].view(*leading, self.out_features)


def padded_rows(rows: int) -> int:
    """The number of rows to compute for so many rows."""
    if rows <= EXACT_ROWS:
        return rows
    step = (1 << (rows - 1).bit_length() - 1) // STEPS_PER_DOUBLING
    return -(-rows // step) * step


def pack_linear_layers(module: nn.Module) -> None:
    """Replace the large linear layers of a module, if this CPU and this torch can.

    A weight that is shared (a tied head's) stays: packing would hold it in memory twice.
    """
    if not can_pack():
        return
    users: dict[int, int] = {}
    for inner in module.modules():
        for own in inner.parameters(recurse=False):
            users[id(own)] = users.get(id(own), 0) + 1
    for inner in list(module.modules()):
        for name, layer in list(inner.named_children()):
            if (made := _packed(layer, users)) is not None:
                setattr(inner, name, made)


def can_pack() -> bool:
    return torch.backends.mkldnn.is_available() and all(
        hasattr(torch.ops.mkldnn, name) for name in ("_reorder_linear_weight", "_linear_pointwise")
    )


def _packed(layer: nn.Module, users: dict[int, int]) -> PackedLinear | None:
    if not _plain(layer) and not _covers(layer):
        return None
    weight, bias = layer.weight, layer.bias
    assert isinstance(weight, Tensor)
    assert bias is None or isinstance(bias, Tensor)
    if weight.device.type != "cpu" or weight.numel() < LEAST_WEIGHTS or users[id(weight)] > 1:
        return None
    if weight.dtype not in (torch.float32, torch.bfloat16):
        return None
    # A linear layer's inputs may have any shape, a convolution's are [patches, channels, ...].
    return PackedLinear(weight.detach().flatten(1), bias, -1 if _plain(layer) else 1)


def _plain(layer: nn.Module) -> bool:
    return type(layer) is nn.Linear


def _covers(layer: nn.Module) -> bool:
    """A convolution over patches that are cut beforehand, one kernel each, as in Qwen's towers.

    Only in three dimensions: a convolution that cuts pictures itself has two.
    """
    return type(layer) is nn.Conv3d and layer.kernel_size == layer.stride and layer.groups == 1
