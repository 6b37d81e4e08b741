from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import reference
from triptych import models
from triptych.checkpoint import Model, open_model
from triptych.engines.torch import weights
from triptych.errors import UnsupportedModel

# What transformers 5 names its modules, to what published checkpoints say.
QWEN = (("model.visual.", "visual."), ("model.language_model.", "model."))
PUBLISHED = {
    "qwen2_vl": QWEN,
    "qwen2_5_vl": QWEN,
    "qwen3_vl": (),  # as transformers saves it
    "llava": (
        ("model.vision_tower.", "vision_tower.vision_model."),
        ("model.multi_modal_projector.", "multi_modal_projector."),
        ("model.language_model.", "language_model.model."),
        ("lm_head.", "language_model.lm_head."),
    ),
}


def load(model: Model, part: weights.ModelPart, **settings: Any) -> torch.nn.Module:
    return weights.load_part(
        models.find_family(model), model, part, "cpu", torch.float32, **settings
    )


def copy_of(model: Model, folder: Path, tensors: dict[str, torch.Tensor]) -> Model:
    """The checkpoint with other weights."""
    shutil.copytree(model.folder, folder, dirs_exist_ok=True)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return open_model(folder)


def stock_state(model: Model) -> dict[str, torch.Tensor]:
    return dict(reference.stock_model(model.folder).state_dict())


@pytest.mark.parametrize("part", ["encoder", "language"])
def test_only_the_parts_own_tensors_are_read(
    model: Model, part: weights.ModelPart, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[str] = []

    class Spy:
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            self._real = real(*args, **kwargs)

        def __enter__(self) -> Spy:
            return self

        def __exit__(self, *_: object) -> None: ...

        def keys(self) -> list[str]:
            return list(self._real.keys())

        def get_tensor(self, name: str) -> torch.Tensor:
            read.append(name)
            return self._real.get_tensor(name)

    real = weights.safe_open
    monkeypatch.setattr(weights, "safe_open", Spy)
    module = load(model, part)
    mine = [name for name in stock_state(model) if (part == "encoder") == _is_vision(name)]
    assert len(read) == len(set(read)) == len(mine)
    assert all(_is_vision(name) == (part == "encoder") for name in read)
    assert weights.count_parameters(module) == sum(stock_state(model)[n].numel() for n in mine)


def _is_vision(name: str) -> bool:
    return any(word in name for word in ("visual", "vision_tower", "multi_modal_projector"))


def test_the_parts_together_are_the_whole(model: Model) -> None:
    whole = sum(p.numel() for p in reference.stock_model(model.folder).parameters())
    parts = [weights.count_parameters(load(model, part)) for part in ("encoder", "language")]
    assert sum(parts) == whole
    assert min(parts) > 0


@pytest.mark.parametrize("published", [False, True])
def test_names_of_published_checkpoints_and_of_transformers(
    model: Model, tmp_path: Path, published: bool
) -> None:
    tensors = stock_state(model)
    if published:
        for new, old in PUBLISHED[model.family]:
            tensors = {
                old + name.removeprefix(new) if name.startswith(new) else name: value
                for name, value in tensors.items()
            }
        if PUBLISHED[model.family]:
            assert not any(name.startswith("model.language_model.") for name in tensors)
    else:
        assert any(name.startswith("model.language_model.") for name in tensors)
    other = copy_of(model, tmp_path, tensors)
    for part in ("encoder", "language"):
        expected, got = load(model, part).state_dict(), load(other, part).state_dict()
        assert expected.keys() == got.keys()
        assert all(torch.equal(expected[name], got[name]) for name in expected)


def test_buffers_have_their_values(model: Model) -> None:
    stock = {
        name.rpartition(".")[2]: []
        for name, _ in reference.stock_model(model.folder).named_buffers()
    }
    for name, buffer in reference.stock_model(model.folder).named_buffers():
        stock[name.rpartition(".")[2]].append(buffer.tolist())
    found = 0
    for part in ("encoder", "language"):
        for name, buffer in load(model, part).named_buffers():
            assert buffer.tolist() in stock[name.rpartition(".")[2]]
            found += 1
    assert found == len(list(reference.stock_model(model.folder).named_buffers()))


def test_frequencies_stay_exact_in_half_precision(model: Model) -> None:
    family = models.find_family(model)
    module = weights.load_part(family, model, "language", "cpu", torch.bfloat16)
    assert {p.dtype for p in module.parameters()} == {torch.bfloat16}
    assert {b.dtype for b in module.buffers()} == {torch.float32}


def test_building_takes_no_memory(model: Model) -> None:
    family = models.find_family(model)
    with weights.EmptyWeights():
        module = family.build_language()
    assert all(p.is_meta for p in module.parameters() if p.ndim > 1)
    assert not any(b.is_meta for b in module.buffers())


def test_sharded_checkpoints(model: Model, tmp_path: Path) -> None:
    shutil.copytree(model.folder, tmp_path, dirs_exist_ok=True)
    tensors = load_file(tmp_path / "model.safetensors")
    (tmp_path / "model.safetensors").unlink()
    names = sorted(tensors)
    shards = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for file, held in shards.items():
        save_file({name: tensors[name] for name in held}, tmp_path / file)
    places = {name: file for file, held in shards.items() for name in held}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    expected, got = load(model, "language"), load(open_model(tmp_path), "language")
    for mine, theirs in zip(expected.parameters(), got.parameters(), strict=True):
        assert torch.equal(mine, theirs)
    (tmp_path / "b.safetensors").unlink()
    with pytest.raises(UnsupportedModel, match=r"b\.safetensors"):
        load(open_model(tmp_path), "language")


@pytest.mark.parametrize("stored_twice", [False, True])
def test_tied_embeddings(model: Model, tmp_path: Path, stored_twice: bool) -> None:
    tensors = stock_state(model)
    if stored_twice:
        tensors["lm_head.weight"] = tensors["model.language_model.embed_tokens.weight"].clone()
    else:
        del tensors["lm_head.weight"]
    copy_of(model, tmp_path, tensors)
    config = json.loads((tmp_path / "config.json").read_text())
    config["tie_word_embeddings"] = True
    config["text_config"]["tie_word_embeddings"] = True
    (tmp_path / "config.json").write_text(json.dumps(config))
    tied = open_model(tmp_path)
    module = load(tied, "language")
    language = models.find_family(tied).language(module)
    assert language.head.weight is language.embed.weight
    rows = tensors["model.language_model.embed_tokens.weight"]
    assert torch.equal(language.head.weight, rows)
    assert weights.count_parameters(module) == (
        weights.count_parameters(load(model, "language")) - rows.numel()
    )


def test_missing_unknown_and_misshapen_weights_are_named(model: Model, tmp_path: Path) -> None:
    whole = stock_state(model)
    norm = "model.language_model.norm.weight"
    lacking = {name: value for name, value in whole.items() if name != norm}
    with pytest.raises(UnsupportedModel, match=r"lacks.*norm\.weight"):
        load(copy_of(model, tmp_path / "a", lacking), "language")
    extra = {**whole, "model.language_model.surprise": torch.zeros(1)}
    with pytest.raises(UnsupportedModel, match=r"unknown.*model\.language_model\.surprise"):
        load(copy_of(model, tmp_path / "b", extra), "language")
    odd = {**whole, norm: torch.zeros(3)}
    with pytest.raises(UnsupportedModel, match=r"norm\.weight is \[3\].*\[128\]"):
        load(copy_of(model, tmp_path / "c", odd), "language")
    assert load(open_model(tmp_path / "a"), "encoder")  # the encoder is whole


def test_pickled_weights_are_refused(model: Model, tmp_path: Path) -> None:
    shutil.copytree(model.folder, tmp_path, dirs_exist_ok=True)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(UnsupportedModel, match=r"no \*\.safetensors files\.$"):
        load(open_model(tmp_path), "encoder")
    (tmp_path / "pytorch_model.bin").write_bytes(b"\x80\x04.")
    with pytest.raises(UnsupportedModel, match="Pickled weights are never loaded"):
        load(open_model(tmp_path), "encoder")
    (tmp_path / "model.safetensors").write_bytes(b"\xff" * 64)
    with pytest.raises(UnsupportedModel, match="cannot be read"):
        load(open_model(tmp_path), "encoder")


def test_quantized_weights_are_refused(model: Model, tmp_path: Path) -> None:
    shutil.copytree(model.folder, tmp_path, dirs_exist_ok=True)
    config = json.loads((tmp_path / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "awq"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(UnsupportedModel, match="quantized"):
        load(open_model(tmp_path), "encoder")


def test_progress_goes_from_nothing_to_all(model: Model) -> None:
    seen: list[float] = []
    load(model, "encoder", progress=lambda what, fraction: seen.append(fraction))
    assert seen[0] == 0.0
    assert seen[-1] == 1.0
    assert seen == sorted(seen)


def test_the_attention_is_chosen_by_name(model: Model) -> None:
    module = load(model, "language", attention="some_name")
    language = models.find_family(model).language(module)
    assert language.model.layers[0].self_attn.config._attn_implementation == "some_name"
