"""SGLang's options for each role, and which more are allowed; all of it without SGLang."""

from __future__ import annotations

import argparse
import sys
from types import ModuleType
from typing import Any

import msgspec
import pytest
import torch

from triptych.checkpoint import open_model, packaged_folder
from triptych.config import Config
from triptych.engines.sglang import options
from triptych.errors import InvalidConfig
from triptych.runtime.gpus import GpuInfo, GpuInventory
from triptych.topology import Role

MODEL = open_model(packaged_folder("triptych-demo"))


@pytest.fixture(autouse=True)
def server_args(monkeypatch: pytest.MonkeyPatch) -> None:
    """A parser that knows what Triptych decides and ``--page-size``, in place of SGLang's."""
    module: Any = ModuleType("sglang.srt.server_args")

    class ServerArgs:
        @staticmethod
        def add_cli_args(parser: argparse.ArgumentParser) -> None:
            for name in (*options.SET_BY_TRIPTYCH, "--log-level", "--page-size"):
                flag = name in ("--skip-tokenizer-init", "--incremental-streaming-output")
                parser.add_argument(name, action="store_true" if flag else "store")
            parser.add_argument("--disaggregation-transfer-backend")

    def prepare_server_args(words: list[str]) -> dict[str, Any]:
        parser = argparse.ArgumentParser()
        ServerArgs.add_cli_args(parser)
        made = vars(parser.parse_args(words))
        if made["page_size"] == "0":
            raise ValueError("page_size must be positive")
        return made

    module.ServerArgs, module.prepare_server_args = ServerArgs, prepare_server_args
    for name in ("sglang", "sglang.srt"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, "sglang.srt.server_args", module)


def told(role: str, **settings: Any) -> Any:
    return options.server_args(Config(device="cpu", **settings), Role(role), MODEL)


@pytest.mark.parametrize(
    ("role", "mode"), [("EPD", "null"), ("PD", "null"), ("EP", "prefill"), ("D", "decode")]
)
def test_the_role_is_its_mode(role: str, mode: str):
    assert told(role)["disaggregation_mode"] == mode


def test_every_prefill_has_a_port_of_its_own():
    ports = {told("P")["disaggregation_bootstrap_port"] for _ in range(2)}
    assert None not in ports
    assert told("D")["disaggregation_bootstrap_port"] is None


def test_the_context_leaves_sglang_what_it_keeps_for_itself():
    model = msgspec.structs.replace(MODEL, context=512)
    made = options.server_args(Config(device="cpu"), Role("EPD"), model)
    assert int(made["context_length"]) == 512 + options.CONTEXT_MARGIN


@pytest.mark.parametrize(
    ("free", "fraction"), [(80, 0.352), (40, 0.704), (20, options.MOST_STATIC)]
)
def test_a_share_of_a_gpu_is_one_of_what_is_free(monkeypatch, free, fraction):
    gpus = GpuInventory((GpuInfo("a GPU", 80 << 30, free << 30),))
    monkeypatch.setattr(options, "visible_gpus", lambda free: gpus)
    assert options.static_fraction(Config(gpu_memory_utilization=0.4)) == pytest.approx(fraction)


def test_the_operators_share_of_a_gpu_is_used(monkeypatch):
    monkeypatch.setattr(options, "choose_device", lambda _: torch.device("cuda"))
    monkeypatch.setattr(options, "static_fraction", lambda _: 0.5)
    shared = {"gpu_memory_utilization": 0.4}
    decided = options._triptychs_options(Config(**shared), Role("P"), MODEL)
    assert "--mem-fraction-static=0.500" in decided
    given = Config(engine_args="--mem-fraction-static 0.3", **shared)
    for config in (given, Config()):
        decided = options._triptychs_options(config, Role("P"), MODEL)
        assert not any("mem-fraction" in word for word in decided)


def test_the_operators_options_come_last():
    made = told("P", engine_args="--page-size 4 --disaggregation-transfer-backend mooncake")
    assert made["page_size"] == "4"
    assert made["disaggregation_transfer_backend"] == "mooncake"
    assert told("P")["disaggregation_transfer_backend"] == "nixl"


@pytest.mark.parametrize("text", ["--no-such", "--page", "stray", "--page-size"])
def test_what_sglang_does_not_know_is_refused(text: str):
    with pytest.raises(InvalidConfig, match="--engine-args"):
        told("EPD", engine_args=text)


@pytest.mark.parametrize(
    "text", ["--model-path x", "--context_length=5", "--dtype=float16", "--host ::"]
)
def test_what_triptych_sets_is_refused(text: str):
    with pytest.raises(InvalidConfig, match="Triptych"):
        told("EPD", engine_args=text)


def test_what_cannot_be_split_is_refused():
    with pytest.raises(InvalidConfig, match="can't be read"):
        told("EPD", engine_args="--page-size '4")


def test_values_that_sglang_refuses_are_the_operators():
    with pytest.raises(InvalidConfig, match="must be positive"):
        told("EPD", engine_args="--page-size 0")
