"""Packed layers compute what plain ones do, and only what gains is packed."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from triptych.engines.torch import packed_linear
from triptych.engines.torch.packed_linear import LEAST_WEIGHTS, PackedLinear, pack_linear_layers

pytestmark = pytest.mark.skipif(not packed_linear.can_pack(), reason="this torch has no oneDNN")

SIDE = 512
assert SIDE * SIDE >= LEAST_WEIGHTS


class Part(nn.Module):
    def __init__(self, *, tied: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(SIDE, SIDE)
        self.body = nn.Sequential(nn.Linear(SIDE, SIDE), nn.Linear(SIDE, SIDE, bias=False))
        self.small = nn.Linear(8, 8)
        self.cut = nn.Conv3d(3, SIDE, (2, 14, 14), (2, 14, 14))
        self.slides = nn.Conv3d(3, SIDE, (2, 14, 14), (1, 14, 14))
        self.head = nn.Linear(SIDE, SIDE, bias=False)
        if tied:
            self.head.weight = self.embed.weight
        self.requires_grad_(False)


@pytest.mark.parametrize("shape", [(1,), (17,), (2, 5), (1, 300)])
def test_a_packed_layer_gives_what_the_plain_one_does(shape: tuple[int, ...]) -> None:
    part, x = Part(), torch.randn(*shape, SIDE)
    plain = part.body(x)
    pack_linear_layers(part)
    assert all(isinstance(layer, PackedLinear) for layer in part.body)
    torch.testing.assert_close(part.body(x), plain, atol=1e-5, rtol=1e-5)
    with torch.inference_mode():
        torch.testing.assert_close(part.body(x), plain, atol=1e-5, rtol=1e-5)


def test_few_numbers_of_rows_are_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    """oneDNN keeps half a megabyte of code for each that it meets: memory rose with every prompt
    of another length."""
    seen: set[int] = set()
    real = torch.ops.mkldnn._linear_pointwise

    def multiply(x: torch.Tensor, *rest: object) -> torch.Tensor:
        seen.add(len(x))
        result: torch.Tensor = real(x, *rest)
        return result

    monkeypatch.setattr(torch.ops.mkldnn, "_linear_pointwise", multiply)
    layer = PackedLinear(torch.randn(8, 8), None, -1)
    for rows in range(2049):
        x = torch.randn(rows, 8)
        assert layer(x).shape == (rows, 8)
        assert rows <= packed_linear.padded_rows(rows) <= rows * 9 / 8
    assert len(seen) <= 16 + 8 * 7 + 1


def test_a_convolution_over_ready_cut_patches_is_a_linear_layer() -> None:
    part, patches = Part(), torch.randn(5, 3, 2, 14, 14)
    plain = part.cut(patches)
    pack_linear_layers(part)
    assert isinstance(part.cut, PackedLinear)
    torch.testing.assert_close(
        part.cut(patches).view(5, SIDE), plain.view(5, SIDE), atol=1e-5, rtol=1e-5
    )


def test_what_reads_a_layers_type_still_can() -> None:
    part = Part()
    pack_linear_layers(part)
    layer = part.body[0]
    assert (layer.weight.dtype, layer.weight.device.type) == (torch.float32, "cpu")
    assert (layer.in_features, layer.out_features) == (SIDE, SIDE)


def test_small_overlapping_and_tied_layers_stay() -> None:
    part = Part(tied=True)
    pack_linear_layers(part)
    assert type(part.small) is nn.Linear
    assert type(part.slides) is nn.Conv3d
    assert type(part.head) is nn.Linear
    assert part.head.weight is part.embed.weight


def test_a_head_of_its_own_is_packed() -> None:
    part = Part()
    pack_linear_layers(part)
    assert isinstance(part.head, PackedLinear)
