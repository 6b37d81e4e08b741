from __future__ import annotations

import os
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from triptych.cli import main

ROWS = torch.randn(6, 8, generator=torch.Generator().manual_seed(0))


def test_tensors_by_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tensors = {
        "image_embeds": ROWS.bfloat16(),
        "image_grid_thw": torch.tensor([[1, 4, 6]]),
        "wide": ROWS.t(),
    }
    source, target = tmp_path / "a.pt", tmp_path / "a.safetensors"
    torch.save(tensors, source)
    assert main(["convert-embeddings", str(source), str(target)]) == 0
    got = load_file(target)
    assert got.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert got[name].dtype == tensor.dtype
        assert torch.equal(got[name], tensor)
    assert str(target) in capsys.readouterr().out


def test_a_bare_tensor_is_named_by_its_kind(tmp_path: Path) -> None:
    source, target = tmp_path / "a.bin", tmp_path / "a.safetensors"
    torch.save(ROWS, source)
    assert main(["convert-embeddings", str(source), str(target), "--kind", "audio"]) == 0
    assert torch.equal(load_file(target)["audio_embeds"], ROWS)


class _Runs:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.path),)


def test_b35_a_pickle_that_runs_a_command_does_not(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, target, ran = tmp_path / "a.pt", tmp_path / "a.safetensors", tmp_path / "ran"
    source.write_bytes(pickle.dumps(_Runs(ran), 2))
    assert main(["convert-embeddings", str(source), str(target)]) == 2
    assert "plain tensors" in capsys.readouterr().err
    assert not ran.exists()
    assert not target.exists()


def test_files_that_are_not_there_or_there_already(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, target = tmp_path / "a.pt", tmp_path / "a.safetensors"
    assert main(["convert-embeddings", str(source), str(target)]) == 2
    assert "cannot be read" in capsys.readouterr().err
    torch.save(ROWS, source)
    target.write_text("mine")
    assert main(["convert-embeddings", str(source), str(target)]) == 2
    assert "exists already" in capsys.readouterr().err
    assert target.read_text() == "mine"


def test_without_a_process_to_read_in_nothing_is_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise OSError("no process is to be had")

    monkeypatch.setattr("triptych.commands.convert.DecoderProcess", refuse)
    source, target = tmp_path / "a.pt", tmp_path / "a.safetensors"
    torch.save(ROWS, source)
    assert main(["convert-embeddings", str(source), str(target)]) == 2
    assert "cannot be converted" in capsys.readouterr().err
    assert not target.exists()
