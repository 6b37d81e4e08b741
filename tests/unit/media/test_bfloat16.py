from __future__ import annotations

import numpy as np
import pytest
import torch

from triptych.media import embeds

BITS = np.arange(1 << 16, dtype=np.uint32).astype(np.uint16)


def as_torch(values: np.ndarray) -> torch.Tensor:
    tensor = torch.from_numpy(values.copy())
    return tensor.view(torch.bfloat16) if values.dtype == np.uint16 else tensor


@pytest.mark.parametrize("source", [BITS, BITS.view(np.float16)], ids=["bfloat16", "float16"])
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_every_16_bit_value_becomes_what_torch_makes_of_it(source: np.ndarray, dtype: str) -> None:
    got = as_torch(embeds.convert_floats(source, dtype))
    expected = as_torch(source).to(getattr(torch, dtype))
    assert got.dtype == expected.dtype
    assert torch.equal(got.isnan(), expected.isnan())
    assert torch.equal(got.nan_to_num(0), expected.nan_to_num(0))


def test_rounding_is_to_nearest_and_even() -> None:
    bits = np.random.default_rng(0).integers(0, 1 << 32, 100_000, dtype=np.uint32)
    ties = bits & 0xFFFF0000 | 0x8000
    for values in (bits.view(np.float32), ties.view(np.float32)):
        got = as_torch(embeds.convert_floats(values, "bfloat16"))
        expected = torch.from_numpy(values).bfloat16()
        assert torch.equal(got.nan_to_num(1), expected.nan_to_num(1))
        assert torch.equal(got.isnan(), expected.isnan())


def test_finite() -> None:
    expected = as_torch(BITS).isfinite().numpy()
    assert np.array_equal(embeds.is_finite_bfloat16(BITS), expected)
