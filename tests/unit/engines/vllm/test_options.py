"""vLLM's options for each role; all of it without vLLM."""

import json
from pathlib import Path

import msgspec
import pytest

from triptych.checkpoint import open_model, packaged_folder
from triptych.config import Config
from triptych.engines.checks import check_family
from triptych.engines.vllm import options
from triptych.errors import InvalidConfig, UnsupportedModel
from triptych.topology import Role

MODEL = open_model(packaged_folder("triptych-demo"))


def told(role, config=None, *, model=MODEL, cpu=True):
    words = options.vllm_arguments(config or Config(), Role(role), model, Path("/home"), cpu=cpu)
    return {name: value for name, _, value in (word.partition("=") for word in words)}


def test_a_cpu_gets_exact_numbers_and_a_kv_cache_of_the_size_asked_for():
    words = told("EPD", Config(kv_cache_bytes=64 << 20))
    assert words["--dtype"] == "float32"
    assert words["--kv-cache-memory-bytes"] == str(64 << 20)
    assert int(words["--block-size"]) % 32 == 0


def test_a_gpu_gets_vllms_own_defaults():
    words = told("EPD", cpu=False)
    assert words["--dtype"] == "auto"
    assert not {"--enforce-eager", "--block-size", "--kv-cache-memory-bytes"} & set(words)


def test_the_operators_dtype_and_context_are_passed_on():
    words = told("PD", Config(dtype="bfloat16", max_model_len=512))
    assert words["--dtype"] == "bfloat16"
    assert words["--max-model-len"] == "512"
    assert "--max-model-len" not in told("PD")


@pytest.mark.parametrize(
    ("role", "family", "loaded"),
    [
        ("EPD", "qwen2_5_omni", True),
        ("EP", "qwen2_5_omni", True),
        ("PD", "qwen2_5_omni", False),
        ("P", "qwen2_5_omni", False),
        ("PD", "qwen3_vl", True),
        ("D", "qwen3_vl", False),
    ],
)
def test_towers_are_loaded_only_where_they_are_used(role, family, loaded):
    model = msgspec.structs.replace(MODEL, family=family)
    limits = told(role, model=model).get("--limit-mm-per-prompt")
    assert limits is None if loaded else set(json.loads(limits).values()) == {0}


@pytest.mark.parametrize(
    ("role", "side"),
    [
        ("EPD", None),
        ("PD", None),
        ("P", "kv_producer"),
        ("EP", "kv_producer"),
        ("D", "kv_consumer"),
    ],
)
def test_the_kv_cache_leaves_and_comes_where_the_pattern_says(role, side):
    transfer = told(role).get("--kv-transfer-config")
    assert (transfer and json.loads(transfer)["kv_role"]) == side


@pytest.mark.parametrize("role", ["EPD", "EP", "PD", "P", "D"])
def test_cached_memory_is_published_to_its_worker_only(role):
    published = json.loads(told(role)["--kv-events-config"])
    assert published["enable_kv_cache_events"]
    assert {published["endpoint"], published["replay_endpoint"]} == {
        "ipc:///home/kv",
        "ipc:///home/kv-replay",
    }


@pytest.mark.parametrize("role", ["EPD", "EP", "PD", "P", "D"])
def test_embeddings_come_with_requests(role):
    rows = json.loads(told(role)["--ec-transfer-config"])
    assert (rows["ec_connector"], rows["ec_role"]) == ("EmbeddingConnector", "ec_consumer")


def test_an_encoder_alone_writes_embeddings_into_the_workers_folder():
    words = told("E", Config(encoder="native"))
    rows = json.loads(words["--ec-transfer-config"])
    assert (rows["ec_connector"], rows["ec_role"]) == ("EmbeddingFileConnector", "ec_producer")
    assert rows["ec_connector_extra_config"] == {"shared_storage_path": "/home"}
    assert not {"--kv-events-config", "--kv-transfer-config", "--limit-mm-per-prompt"} & set(words)


def test_no_two_incarnations_have_one_name():
    first, second = (json.loads(told("P")["--kv-transfer-config"]) for _ in range(2))
    assert first["engine_id"] != second["engine_id"]


def test_words_of_the_operator_are_read_as_a_shell_does():
    config = Config(engine_args="""--max-num-seqs 8 --compilation-config '{"level": 0}'""")
    assert options.checked_engine_args(config, Role("PD")) == [
        "--max-num-seqs",
        "8",
        "--compilation-config",
        '{"level": 0}',
    ]


@pytest.mark.parametrize(
    ("args", "hint"),
    [
        ("--model x", "Triptych's own argument"),
        ("--max_model_len=5", "--max-model-len"),
        ("--ec-transfer-config.ec_role=ec_both", "--encoder"),
        ("--scheduler-cls my.Scheduler", "own scheduler"),
        ("--kv-transfer-config '{}'", "pattern"),
        ("--data-parallel-size=2", "several workers"),
        ("-dp 2", "several workers"),
        ("-dp=2", "several workers"),
        ("-dpn 1", "several workers"),
        ("--config vllm.yaml", "one by one"),
        ("--scheduling-policy priority", "priorities"),
        ("'", "can't be read"),
    ],
)
def test_what_triptych_sets_itself_is_refused_with_what_to_do(args, hint):
    with pytest.raises(InvalidConfig, match=hint):
        options.checked_engine_args(Config(engine_args=args), Role("P"))


def test_a_connector_of_the_operators_own_may_stand_beside_prefill_and_decode_in_one():
    assert options.checked_engine_args(Config(engine_args="--kv-transfer-config {}"), Role("PD"))


def test_the_environment_is_the_operators_first(monkeypatch):
    monkeypatch.setenv("VLLM_LOGGING_LEVEL", "DEBUG")
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    config = Config(cpu_threads=3)
    found = options.vllm_environment(config, Role("PD"), cpu=True)
    assert "VLLM_LOGGING_LEVEL" not in found
    assert found["OMP_NUM_THREADS"] == "3"
    assert "VLLM_NIXL_SIDE_CHANNEL_PORT" not in found


def test_each_side_of_a_hand_over_has_a_port_of_its_own(monkeypatch):
    monkeypatch.setenv("VLLM_NIXL_SIDE_CHANNEL_PORT", "5600")
    monkeypatch.delenv("VLLM_NIXL_SIDE_CHANNEL_HOST", raising=False)
    found = options.vllm_environment(Config(), Role("D"), cpu=True)
    assert found["VLLM_NIXL_SIDE_CHANNEL_PORT"] not in ("0", "5600")
    assert found["VLLM_NIXL_SIDE_CHANNEL_HOST"] == "127.0.0.1"


@pytest.mark.parametrize(
    ("host", "devices"), [("127.0.0.1", "lo"), ("localhost", "lo"), ("0.0.0.0", None)]
)
def test_a_hand_over_on_loopback_listens_nowhere_else(monkeypatch, host, devices):
    for name in ("UCX_NET_DEVICES", "UCX_TLS"):
        monkeypatch.delenv(name, raising=False)
    found = options.vllm_environment(Config(worker_host=host), Role("P"), cpu=True)
    assert found.get("UCX_NET_DEVICES") == devices
    monkeypatch.setenv("UCX_NET_DEVICES", "mlx5_0:1")
    assert "UCX_NET_DEVICES" not in options.vllm_environment(
        Config(worker_host=host), Role("P"), cpu=True
    )


def test_a_share_of_a_gpu_is_passed_on_before_what_the_operator_says():
    shared = Config(gpu_memory_utilization=0.385)
    assert told("P", shared, cpu=False)["--gpu-memory-utilization"] == "0.385"
    assert "--gpu-memory-utilization" not in told("P", cpu=False)
    assert "--gpu-memory-utilization" not in told("P", shared)  # of a CPU nothing is shared out
    # vLLM goes by the last, and ``load`` puts these after ours.
    config = Config(gpu_memory_utilization=0.385, engine_args="--gpu-memory-utilization 0.2")
    assert options.checked_engine_args(config, Role("P")) == ["--gpu-memory-utilization", "0.2"]


def test_an_unknown_family_is_refused_before_vllm_is_loaded():
    check_family("vllm", MODEL)
    with pytest.raises(UnsupportedModel, match="qwen2_5_vl"):
        check_family("vllm", msgspec.structs.replace(MODEL, family="mamba"))
