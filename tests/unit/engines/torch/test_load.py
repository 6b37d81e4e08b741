from __future__ import annotations

import msgspec
import pytest
import torch
from PIL import Image
from tools import tiny

from support.torch_engine import empty, prepared, whole
from triptych.checkpoint import open_model
from triptych.config import Config, TorchSettings
from triptych.engines.base import find_engine
from triptych.engines.torch.load import choose_device, choose_dtype
from triptych.errors import InvalidConfig
from triptych.messages import MediaItem, Sampling, Work
from triptych.topology import Role


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny.make_checkpoint("llava", tmp_path_factory.mktemp("model") / "tiny")


@pytest.mark.parametrize("role", ["E", "P", "D", "PD", "EP", "EPD"])
async def test_a_role_loads_its_own_parts_only(folder, role):
    config = Config(model=str(folder), torch=TorchSettings(kv_blocks=64))
    said = []
    loaded = find_engine("torch")(config, Role(role), empty, lambda what, done: said.append(done))
    try:
        parameters = loaded.report().parameters
        assert (loaded.encoder is not None) == (parameters.encoder > 0) == ("E" in role)
        assert (loaded.engine is not None) == (parameters.language > 0) == (role != "E")
        assert loaded.report().kv_blocks_total == (0 if role == "E" else 64)
        assert said[0] == 0
        assert said[-1] == 1
    finally:
        loaded.close()


async def test_all_stages_in_one_process(folder):
    config = Config(model=str(folder), torch=TorchSettings(kv_blocks=64))
    loaded = find_engine("torch")(config, Role("EPD"), empty, lambda *_: None)
    try:
        picture = Image.new("RGB", (30, 40), (200, 10, 60))
        media = tuple(
            await loaded.encoder.encode([prepared(loaded.encoder.recipes.image, picture)])
        )
        item = MediaItem("image", 1, b"")
        prompt = (5, open_model(folder).media_ids["image"], 7)
        work = Work("w", prompt, (item,), Sampling(seed=1, max_tokens=3, ignore_eos=True))
        answer = await whole(loaded.engine, work, media)
        assert len(answer.ids) == 3
        assert answer.deltas[0].prompt.tokens == media[0].meta.tokens + 2
        counters = loaded.report().counters
        assert counters["encoded_items"] == 1
        assert counters["generated_tokens"] == 3
    finally:
        loaded.close()


def test_devices_that_are_not_there_are_refused():
    assert choose_device("cpu") == torch.device("cpu")
    with pytest.raises(InvalidConfig, match="unknown"):
        choose_device("abacus")
    if not torch.cuda.is_available():
        assert choose_device("auto") == torch.device("cpu")
        with pytest.raises(InvalidConfig, match="no CUDA"):
            choose_device("cuda:1")


def test_the_type_of_numbers_is_the_references_on_a_cpu_and_the_checkpoints_on_a_gpu(folder):
    model = open_model(folder)
    assert choose_dtype("auto", model, torch.device("cpu")) == torch.float32
    assert choose_dtype("bfloat16", model, torch.device("cpu")) == torch.bfloat16
    stored = model.config | {"dtype": "float16"}
    half = msgspec.structs.replace(model, config=stored)
    assert choose_dtype("auto", half, torch.device("cuda")) == torch.float16
