"""Options that Triptych sets are known to the vLLM that is installed; what is not is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from triptych import models
from triptych.checkpoint import open_model, packaged_folder
from triptych.config import Config
from triptych.engines.vllm import options
from triptych.engines.vllm.inputs import FIELDS
from triptych.errors import InvalidConfig
from triptych.topology import Role

MODEL = open_model(packaged_folder("triptych-demo"))
HOME = Path("/nonexistent")


def parse(role: str, engine_args: str = ""):
    config = Config(engine_args=engine_args, max_model_len=512)
    words = options.vllm_arguments(config, Role(role), MODEL, HOME, cpu=True)
    return options.parse_engine_args([*words, *options.checked_engine_args(config, Role(role))])


@pytest.mark.parametrize("role", ["EPD", "PD", "EP", "P", "D"])
def test_vllm_knows_every_option_of_a_role(role):
    args = parse(role)
    assert args.model == str(MODEL.folder)
    assert args.max_model_len == 512
    assert args.ec_transfer_config.ec_connector == "EmbeddingConnector"
    assert (args.kv_transfer_config is not None) == (Role(role).phases in ("P", "D"))


def test_the_operators_word_is_the_last():
    assert parse("PD").block_size == options.CPU_BLOCK_SIZE
    assert parse("PD", "--block-size 64 --max-num-seqs=8").block_size == 64


@pytest.mark.parametrize("args", ["--no-such-option", "--max-num-seq 8", "stray", "--block-size x"])
def test_an_option_that_vllm_does_not_know_is_reported(args):
    with pytest.raises(InvalidConfig, match="--engine-args"):
        parse("PD", args)


def test_every_family_that_is_let_in_has_its_fields():
    for family in models.served_by("vllm"):
        fields = models.FAMILIES[family].vllm_fields
        assert {join for joins in fields.values() for join in joins.values()} <= FIELDS.keys()
