"""The adapter over a fake of TensorRT-LLM's interface. TensorRT-LLM itself was never run."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer
from tools.tiny_builders import BUILDERS
from tools.tiny_folder import TOKENIZER_FILES, tokenizer_folder

from unit.engines.trtllm import fake_tensorrt_llm
from unit.engines.trtllm.fake_parameters import World
from unit.engines.trtllm.rooms import Rooms

FAMILIES = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl")


def without_weights(family: str, folder: Path) -> Path:
    """A tiny checkpoint's settings: the fake reads no more of it."""
    folder.mkdir()
    for name in TOKENIZER_FILES:
        shutil.copyfile(tokenizer_folder(family) / name, folder / name)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    with torch.device("meta"):
        tiny = BUILDERS[family](tokenizer)
    tiny.model.config.save_pretrained(folder)
    files = {**tiny.files, "generation_config.json": {"eos_token_id": list(tiny.end_ids)}}
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content))
    return folder


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("trtllm")
    return {family: without_weights(family, folder / family) for family in FAMILIES}


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    return fake_tensorrt_llm.install(monkeypatch)


@pytest.fixture
async def rooms(world: World, folders: dict[str, Path]):
    rooms = Rooms(world, folders["qwen2_5_vl"])
    yield rooms
    rooms.close()
