from __future__ import annotations

import sys

import pytest

from support.torch_engine import empty
from triptych.config import Config
from triptych.engines.base import find_engine
from triptych.engines.trtllm import load
from triptych.errors import InvalidConfig, UnsupportedModel
from triptych.topology import Role
from unit.engines.trtllm import fake_llm
from unit.engines.trtllm.rooms import Rooms


def opened(folder, role="EPD", **settings):
    config = Config(model=str(folder), engine="trtllm", **settings)
    return find_engine("trtllm")(config, Role(role), empty, lambda *_: None)


@pytest.mark.parametrize("role", ["EPD", "P", "D", "PD", "EP"])
async def test_a_role_has_its_own_parts(rooms, role):
    room = rooms.open(role)
    assert room.engine is not None
    assert (room.encoder is not None) == ("E" in role)
    assert not room.died.is_set()
    assert len(rooms.world.llms) == 1


async def test_a_separate_encoder_is_triptychs_unless_configured(world, folders, monkeypatch):
    asked = []
    monkeypatch.setattr(load, "load_torch", lambda *given: asked.append(given))
    opened(folders["qwen2_5_vl"], "E", device="cpu")
    [(config, role, memory, _)] = asked
    assert (config.device, role, memory) == ("cpu", "E", empty)
    assert not world.llms


def test_without_the_package_it_says_what_to_do(folders, monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorrt_llm", None)
    with pytest.raises(InvalidConfig, match="never run against TensorRT-LLM") as raised:
        opened(folders["qwen2_5_vl"])
    assert "--engine-python" in str(raised.value)


def test_loading_warns_that_the_adapter_never_ran(world, folders, caplog):
    opened(folders["qwen2_5_vl"]).close()
    assert "never run against TensorRT-LLM" in caplog.text


def test_a_model_that_it_has_not_is_refused(world, tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "llava", "vocab_size": 100}')
    with pytest.raises(UnsupportedModel, match="not served by engine trtllm"):
        opened(tmp_path)
    assert not world.llms


@pytest.mark.parametrize("device", ["cpu", "cuda:1"])
def test_devices_are_the_engines_own(world, folders, device):
    with pytest.raises(InvalidConfig, match="CUDA_VISIBLE_DEVICES"):
        opened(folders["qwen2_5_vl"], device=device)


@pytest.mark.parametrize("role", ["P", "PD"])
def test_a_separate_encoder_needs_a_model_that_accepts_embeddings(world, folders, role):
    with pytest.raises(UnsupportedModel, match="EP/D"):
        opened(folders["qwen2_vl"], role)
    assert not world.llms[0]._check_health(), "it was left running"
    opened(folders["qwen2_vl"], "D").close()


async def test_an_unknown_option_ends_the_start(world, folders):
    with pytest.raises(InvalidConfig, match="--engine-args"):
        opened(folders["qwen2_5_vl"], engine_args="--no_such_option 1")
    assert not world.llms


async def test_options_that_the_engine_refuses_end_the_start(world, folders, monkeypatch):
    def refuse(self, **arguments):
        raise ValueError("no GPU has room for it")

    monkeypatch.setattr(fake_llm.LLM, "__init__", refuse)
    with pytest.raises(InvalidConfig, match="no GPU has room"):
        opened(folders["qwen2_5_vl"])


async def test_closing_ends_the_engine(world, folders):
    rooms = Rooms(world, folders["qwen2_5_vl"])
    room = rooms.open("EPD")
    await rooms.answer(room, rooms.work())
    room.close()
    assert not world.llms[0]._check_health()
    assert not room.died.is_set()


async def test_loading_reports_progress(world, folders):
    said = []
    config = Config(model=str(folders["qwen2_5_vl"]), engine="trtllm")
    find_engine("trtllm")(
        config, Role("EPD"), empty, lambda what, done: said.append((what, done))
    ).close()
    assert said == [("starting TensorRT-LLM", 0.0), ("starting TensorRT-LLM", 1.0)]
