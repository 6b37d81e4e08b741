from __future__ import annotations

import io
import os
import pickle
import sys
import warnings
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from triptych.config import Limits
from triptych.errors import EmbeddingShapeMismatch, InvalidEmbedding
from triptych.media import embeds, torch_file
from triptych.recipe import EmbedsFormat

ROWS = torch.randn(6, 8, generator=torch.Generator().manual_seed(0))


def saved(value: Any, **how: Any) -> bytes:
    file = io.BytesIO()
    torch.save(value, file, **how)
    return file.getvalue()


def prepare(data: bytes, limits: Limits | None = None) -> np.ndarray:
    recipe = EmbedsFormat(8, "float32")
    _, (rows,), _ = embeds.prepare_embeds(
        "image", memoryview(data), recipe, limits or Limits(), True
    )
    return rows


@pytest.mark.parametrize(
    "value", [ROWS, {"image_embeds": ROWS}, ROWS[None], torch.nn.Parameter(ROWS)]
)
@pytest.mark.parametrize("zipped", [True, False])
def test_dense_tensors(value: Any, zipped: bool) -> None:
    data = saved(value, _use_new_zipfile_serialization=zipped)
    assert np.array_equal(prepare(data), ROWS.numpy())


def test_a_view_is_what_it_shows() -> None:
    assert np.array_equal(prepare(saved(ROWS.t().contiguous().t())), ROWS.numpy())
    wide = torch.arange(96.0).reshape(6, 16)[:, 4:12]
    assert np.array_equal(prepare(saved(wide)), wide.numpy())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_16_bit(dtype: torch.dtype) -> None:
    assert np.array_equal(prepare(saved(ROWS.to(dtype))), ROWS.to(dtype).float().numpy())


class _Runs:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.path),)


def test_b35_a_pickle_that_runs_a_command_does_not(tmp_path: Path) -> None:
    ran = tmp_path / "ran"
    for data in (
        pickle.dumps(_Runs(ran)),
        saved({"image_embeds": _Runs(ran)}),
        saved(_Runs(ran), _use_new_zipfile_serialization=False),
    ):
        with pytest.raises(InvalidEmbedding):
            prepare(data)
    assert not ran.exists()


def _odd() -> dict[str, Any]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of prototypes in torch
        return {
            "sparse": ROWS.to_sparse(),
            "sparse rows": ROWS.to_sparse_csr(),
            "nested": torch.nested.nested_tensor([ROWS, ROWS[:2]]),
            "quantized": torch.quantize_per_tensor(ROWS, 0.1, 0, torch.quint8),
            "without data": ROWS.to("meta"),
            "repeated": ROWS[:1].expand(1 << 40, 8),
            "complex": ROWS.to(torch.complex64),
            "list": [ROWS],
            "numbered": {1: ROWS},
            "words": {"image_embeds": "none"},
        }


@pytest.mark.parametrize("name", _odd())
@pytest.mark.filterwarnings("ignore")
def test_b36_only_dense_tensors(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in [each for each in sys.modules if each.partition(".")[0] == "transformers"]:
        # pickle looks for a name in every module, and these import what is not there when asked
        monkeypatch.delitem(sys.modules, module)
    with pytest.raises(InvalidEmbedding):
        prepare(saved(_odd()[name]))


def test_b36_indices_out_of_range() -> None:
    indices, values = torch.tensor([[0, 1 << 40]]), torch.ones(2)
    forged = torch.sparse_coo_tensor(indices, values, (2,), check_invariants=False)
    with pytest.raises(InvalidEmbedding):
        prepare(saved(forged))


@pytest.mark.filterwarnings("ignore")
def test_b36_a_tensor_larger_than_its_data() -> None:
    data = saved(ROWS)
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        entries = {entry: archive.read(entry) for entry in archive.namelist()}
    name = next(entry for entry in entries if entry.endswith("data.pkl"))
    forged = entries[name].replace(b"K\x06K\x08\x86", b"K\x66K\x08\x86")  # 102 rows of 8
    assert forged != entries[name]
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", zipfile.ZIP_STORED) as archive:
        for entry, body in entries.items():
            archive.writestr(entry, forged if entry == name else body)
    with pytest.raises(InvalidEmbedding):
        prepare(file.getvalue())


def test_b36_an_archive_that_unpacks_to_more_than_the_limit() -> None:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("archive/data.pkl", b"\x80\x02.")
        archive.writestr("archive/data/0", bytes(1 << 20))
    with pytest.raises(InvalidEmbedding, match="over the limit"):
        prepare(file.getvalue(), Limits(media_bytes=1 << 19))


@pytest.mark.parametrize("kept", [4, 30, 200, -200, -4])
@pytest.mark.parametrize("zipped", [True, False])
def test_b36_cut_short(kept: int, zipped: bool) -> None:
    data = saved(ROWS, _use_new_zipfile_serialization=zipped)
    with pytest.raises(InvalidEmbedding):
        prepare(data[:kept])


def test_b37_holds_for_torch_files_too() -> None:
    with pytest.raises(EmbeddingShapeMismatch):
        prepare(saved(ROWS[:, :7]))
    with pytest.raises(EmbeddingShapeMismatch):
        prepare(saved(ROWS.double()))


def test_names_and_types_stay() -> None:
    tensors = {"image_embeds": ROWS.bfloat16(), "image_grid_thw": torch.tensor([[1, 4, 6]])}
    found = torch_file.read_torch_file(memoryview(saved(tensors)), 1 << 20)
    assert {name: (each.dtype, each.shape) for name, each in found.items()} == {
        "image_embeds": ("BF16", (6, 8)),
        "image_grid_thw": ("I64", (1, 3)),
    }
