from __future__ import annotations

import json
import struct
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save

from triptych.config import Limits
from triptych.errors import EmbeddingShapeMismatch, InvalidEmbedding, MediaError
from triptych.media import embeds
from triptych.messages import MediaKind, MediaMeta
from triptych.recipe import EmbedsFormat

PLAIN = EmbedsFormat(width=8, dtype="float32")
GRID = EmbedsFormat(width=8, dtype="float32", merge=2)
TILES = EmbedsFormat(width=8, dtype="float32", tile=2)
ROWS = torch.randn(6, 8, generator=torch.Generator().manual_seed(0))
THW = torch.tensor([1, 4, 6])


def prepare(
    data: bytes, recipe: EmbedsFormat = PLAIN, kind: MediaKind = "image"
) -> tuple[MediaMeta, np.ndarray]:
    meta, (rows,), cost = embeds.prepare_embeds(kind, memoryview(data), recipe, Limits(), False)
    assert cost == 0
    return meta, rows


def file(header: Any, body: bytes = b"") -> bytes:
    words = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(words)) + words + body


@pytest.mark.parametrize("name", ["image_embeds", "anything"])
@pytest.mark.parametrize("shape", [(6, 8), (1, 6, 8)])
def test_an_embedding(name: str, shape: tuple[int, ...]) -> None:
    meta, rows = prepare(save({name: ROWS.reshape(shape)}))
    assert np.array_equal(rows, ROWS.numpy())
    assert meta == MediaMeta(b"", 6)


@pytest.mark.parametrize("given_as", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("wanted", ["float32", "float16", "bfloat16"])
def test_types_become_the_encoders(given_as: torch.dtype, wanted: str) -> None:
    tensor = ROWS.to(given_as)
    _, rows = prepare(save({"image_embeds": tensor}), EmbedsFormat(8, wanted))
    got = torch.from_numpy(rows.copy())
    if wanted == "bfloat16":
        assert rows.dtype == np.uint16
        got = got.view(torch.bfloat16)
    assert torch.equal(got, tensor.to(getattr(torch, wanted)))


@pytest.mark.parametrize("thw", [THW, THW[None], THW.int(), THW.float()])
def test_a_grid(thw: torch.Tensor) -> None:
    meta, _ = prepare(save({"image_embeds": ROWS, "image_grid_thw": thw}), GRID)
    assert meta.grid == (1, 4, 6)
    assert all(type(count) is int for count in meta.grid)


def test_a_video_has_times() -> None:
    tensors = {"video_embeds": ROWS, "video_grid_thw": torch.tensor([3, 2, 4])}
    assert prepare(save(tensors), GRID, "video")[0].times == (0.0, 1.0, 2.0)
    steps = tensors | {"second_per_grid_ts": torch.tensor([0.5])}
    assert prepare(save(steps), GRID, "video")[0].times == (0.0, 0.5, 1.0)
    exact = tensors | {"video_times": torch.tensor([0.25, 1.5, 2.0])}
    meta, _ = prepare(save(exact), GRID, "video")
    assert (meta.times, meta.kind, meta.tokens) == ((0.25, 1.5, 2.0), "video", 6)
    nan = float("nan")
    for wrong in ([1.0, 2.0], [0.0, nan, 1.0], [-1.0, 0.0, 1.0], [0.0, 1.0, 9e9], [0.0, 2.0, 1.0]):
        with pytest.raises(EmbeddingShapeMismatch):
            prepare(save(tensors | {"video_times": torch.tensor(wrong)}), GRID, "video")


def _with(index: tuple[int, int], value: float) -> torch.Tensor:
    rows = ROWS.clone()
    rows[index] = value
    return rows


@pytest.mark.parametrize(
    "tensor",
    [
        ROWS[0],
        ROWS[None, None],
        torch.zeros(2, 3, 8),
        ROWS[:, :7],
        ROWS[:0],
        ROWS.double(),
        ROWS.long(),
        ROWS.bool(),
        _with((5, 7), float("nan")),
        _with((0, 0), float("inf")),
        _with((3, 3), float("-inf")),
    ],
)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_b37_wrong_rank_width_type_values_or_none(tensor: torch.Tensor, dtype: str) -> None:
    with pytest.raises(EmbeddingShapeMismatch):
        prepare(save({"image_embeds": tensor.contiguous()}), EmbedsFormat(8, dtype))


def test_b37_values_too_large_for_the_encoders_type() -> None:
    data = save({"image_embeds": _with((0, 0), 1e30)})
    assert prepare(data)[1][0, 0] == np.float32(1e30)
    with pytest.raises(EmbeddingShapeMismatch, match="too large for float16"):
        prepare(data, EmbedsFormat(8, "float16"))


@pytest.mark.parametrize(
    "thw",
    [
        None,
        torch.tensor([1, 4, 4]),
        torch.tensor([2, 3, 4]),
        torch.tensor([24, 1, 1]),
        torch.tensor([-1, -4, 6]),
        torch.tensor([0, 4, 6]),
        torch.tensor([1, 4]),
        torch.tensor([[1, 4, 6], [1, 4, 6]]),
        torch.tensor([1.5, 4.0, 4.0]),
        torch.tensor([float("nan"), 4.0, 4.0]),
        torch.tensor([float("inf"), 4.0, 4.0]),
        torch.tensor([True, True, True]),
        torch.tensor([2**62, 2**62, 2**62]),
    ],
)
def test_b37_rows_unlike_the_grid(thw: torch.Tensor | None) -> None:
    tensors = {"image_embeds": ROWS} | ({} if thw is None else {"image_grid_thw": thw})
    with pytest.raises(EmbeddingShapeMismatch):
        prepare(save(tensors), GRID)


@pytest.mark.parametrize("tensors", [{}, {"a": ROWS, "b": ROWS.clone()}])
def test_b37_no_embedding(tensors: dict[str, torch.Tensor]) -> None:
    with pytest.raises(EmbeddingShapeMismatch, match="image_embeds"):
        prepare(save(tensors))


SPEC = {"dtype": "F32", "shape": [1, 8], "data_offsets": [0, 32]}
BODY = bytes(32)
DAMAGED = {
    "empty": b"",
    "short": b"\x01\0\0",
    "header of 2^63": struct.pack("<Q", 1 << 63) + b"{}",
    "header past the end": struct.pack("<Q", 100) + b"{}",
    "large header": file(b"{" + b" " * (2 << 20) + b"}"),
    "no JSON": file(b"{nonsense"),
    "a list": file([SPEC]),
    "overlap": file({"a": SPEC, "b": SPEC}, BODY),
    "hole": file({"a": SPEC | {"data_offsets": [8, 40]}}, bytes(40)),
    "backwards": file({"a": SPEC | {"data_offsets": [32, 0]}}, BODY),
    "negative": file({"a": SPEC | {"data_offsets": [-32, 0]}}, BODY),
    "past the end": file({"a": SPEC}, bytes(8)),
    "more than said": file({"a": SPEC}, bytes(64)),
    "another size": file({"a": SPEC | {"shape": [2, 8]}}, BODY),
    "a size that overflows": file({"a": SPEC | {"shape": [1 << 62, 1 << 62]}}, BODY),
    "unknown type": file({"a": SPEC | {"dtype": "X"}}, BODY),
    "text": b"these are no embeddings at all",
}


@pytest.mark.parametrize("data", DAMAGED.values(), ids=DAMAGED.keys())
def test_b38_damaged_files(data: bytes) -> None:
    with pytest.raises(InvalidEmbedding):
        prepare(data)


def test_b38_the_same_file_undamaged() -> None:
    assert prepare(file({"a": SPEC}, BODY))[0].tokens == 1


@pytest.mark.parametrize("start", [b"PK\x03\x04", b"\x80\x02", b"\x80\x04", b"\x80\x05"])
def test_b35_pickles_are_refused_with_a_hint(start: bytes) -> None:
    with pytest.raises(InvalidEmbedding, match="triptych convert-embeddings"):
        prepare(start + bytes(64))


def test_what_could_be_safetensors_is_never_read_by_torch() -> None:
    start = b"\x80\x02\0\0\0\0\0\0{"
    assert not embeds.looks_like_torch(memoryview(start))
    with pytest.raises(InvalidEmbedding):
        embeds.prepare_embeds("image", memoryview(start), PLAIN, Limits(), True)


VALID = save({"image_embeds": ROWS, "image_grid_thw": THW})


@settings(max_examples=300, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, len(VALID) - 1), st.integers(0, 255)), max_size=8),
    st.integers(0, len(VALID)),
)
def test_a_changed_file_is_refused_or_right(changes: list[tuple[int, int]], end: int) -> None:
    data = bytearray(VALID)
    for index, value in changes:
        data[index] = value
    for raw in (data, data[:end]):
        try:
            meta, rows = prepare(bytes(raw), GRID)
        except MediaError:
            continue
        assert rows.shape == (meta.tokens, 8)
        assert np.isfinite(rows).all()
        assert meta.grid[0] * meta.grid[1] * meta.grid[2] == meta.tokens * 4


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=64), st.binary(max_size=200))
def test_any_bytes_are_refused(header: bytes, body: bytes) -> None:
    for data in (header + body, file(b"{" + header, body)):
        with pytest.raises(MediaError):
            prepare(data)


@pytest.mark.parametrize(("count", "ratio"), [(2, None), (2, (1, 1)), (6, (1, 2)), (10, (2, 2))])
def test_tiles(count: int, ratio: tuple[int, int] | None) -> None:
    said = {} if ratio is None else {"aspect_ratios": torch.tensor(ratio)}
    meta, rows = prepare(save({"image_embeds": torch.zeros(count, 8), **said}), TILES)
    assert meta == MediaMeta(b"", count, ratio or (1, 1))
    assert rows.shape == (count, 8)


@pytest.mark.parametrize(
    ("count", "ratio"), [(6, None), (4, (1, 2)), (6, (2, 2)), (2, (0, 1)), (2, (1, 1, 1))]
)
def test_b37_rows_unlike_the_tiles(count: int, ratio: tuple[int, ...] | None) -> None:
    said = {} if ratio is None else {"aspect_ratios": torch.tensor(ratio)}
    with pytest.raises(EmbeddingShapeMismatch, match=r"aspect_ratios"):
        prepare(save({"image_embeds": torch.zeros(count, 8), **said}), TILES)
