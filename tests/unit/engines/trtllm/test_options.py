from __future__ import annotations

import pytest

from triptych.checkpoint import open_model
from triptych.config import Config
from triptych.engines.trtllm import api, options
from triptych.errors import InvalidConfig
from triptych.topology import Role


@pytest.fixture
def arguments(world, folders):
    folder = folders["qwen2_5_vl"]

    def read(text: str = "", role: str = "EPD", **settings: object):
        config = Config(model=str(folder), engine_args=text, **settings)
        model = open_model(folder, config.max_model_len)
        return options.llm_arguments(api.import_trtllm(), config, Role(role), model)

    return read


def test_what_we_set_ourselves(arguments, folders):
    chosen = arguments(max_model_len=512, dtype="bfloat16")
    assert chosen == {
        "model": str(folders["qwen2_5_vl"]),
        "dtype": "bfloat16",
        "max_seq_len": 512,
        "enable_iter_perf_stats": True,
        "guided_decoding_backend": "xgrammar",
    }


@pytest.mark.parametrize(
    ("role", "transfers", "plain"), [("P", True, True), ("EP", True, True), ("D", True, False)]
)
def test_callers_of_a_shared_request_transfer(arguments, role, transfers, plain):
    chosen = arguments(role=role, max_model_len=512)
    config = {"backend": "DEFAULT", "max_tokens_in_buffer": 512}
    assert chosen.get("cache_transceiver_config") == (config if transfers else None)
    assert chosen.get("disable_overlap_scheduler", False) == plain


@pytest.mark.parametrize(
    ("text", "given"),
    [
        ("--max_batch_size 8", {"max_batch_size": 8}),
        ("--max-batch-size=8", {"max_batch_size": 8}),
        ("--tp_size 2", {"tensor_parallel_size": 2}),
        (
            "--trust_remote_code --max_num_tokens 9",
            {"trust_remote_code": True, "max_num_tokens": 9},
        ),
        (
            "--kv_cache_free_gpu_memory_fraction 0.5 --kv_cache_config.enable_block_reuse false",
            {"kv_cache_config": {"free_gpu_memory_fraction": 0.5, "enable_block_reuse": False}},
        ),
        ("--kv_cache_config '{max_tokens: 64}'", {"kv_cache_config": {"max_tokens": 64}}),
    ],
)
def test_options_as_its_own_server_takes_them(arguments, text, given):
    chosen = arguments(text)
    assert {name: chosen[name] for name in given} == given


def test_settings_within_settings_are_added(arguments):
    chosen = arguments("--cache_transceiver_config.backend NIXL", role="D", max_model_len=64)
    assert chosen["cache_transceiver_config"] == {"backend": "NIXL", "max_tokens_in_buffer": 64}


@pytest.mark.parametrize("name", ["config", "extra_llm_api_options"])
def test_a_file_of_settings_and_options_before_it(arguments, tmp_path, name):
    file = tmp_path / "its own.yaml"
    file.write_text("max_batch_size: 4\nkv_cache_config:\n  dtype: fp8\n  max_tokens: 7\n")
    chosen = arguments(f"--max_batch_size 16 --{name} '{file}' --kv_cache_config.max_tokens 8")
    assert chosen["max_batch_size"] == 16
    assert chosen["kv_cache_config"] == {"dtype": "fp8", "max_tokens": 8}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("--max_batch_sise 8", "max_batch_size"),
        ("--nothing_of_the_kind 1", "no option nothing_of_the_kind"),
        ("--kv_cache_config.no_such 1", "no_such"),
        ("--max_num_tokens many", "max_num_tokens"),
        ("--model other", "MODEL"),
        ("--max_seq_len 9", "--max-model-len"),
        ("--dtype float16", "--dtype"),
        ("8", "'8' is not an option"),
        ("--", "'--' is not an option"),
        ("--max_batch_size 'x", "quotation"),
        ("--config /nowhere/at/all.yaml", "can't be read"),
        ("--max_batch_size '{'", "not YAML"),
        ("--cache_transceiver_config.backend CARRIER_PIGEON", "CARRIER_PIGEON"),
    ],
)
def test_unknown_settings_are_refused_at_start(arguments, text, said):
    with pytest.raises(InvalidConfig, match="--engine-args") as raised:
        arguments(text)
    assert said in str(raised.value)


@pytest.mark.parametrize("content", ["- 1\n- 2\n", "8", "1: 2\n", "model: other\n", "no_such: 1\n"])
def test_a_file_without_settings_is_refused(arguments, tmp_path, content):
    file = tmp_path / "settings.yaml"
    file.write_text(content)
    with pytest.raises(InvalidConfig, match="--engine-args"):
        arguments(f"--config {file}")
