"""A worker's settings as vLLM's own options, and the environment it reads before all else.

What the operator gives with --engine-args comes after what Triptych sets, and so overrules it; what
only Triptych can decide is refused. Loads vLLM only to read its options.
"""

from __future__ import annotations

import json
import os
import uuid
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from triptych import models
from triptych.checkpoint import KINDS, Model
from triptych.config import Config
from triptych.engines.adapter.arguments import split_arguments
from triptych.errors import InvalidConfig, UnsupportedModel
from triptych.host import free_port, resolve_host
from triptych.topology import Role

if TYPE_CHECKING:
    from vllm.engine.arg_utils import AsyncEngineArgs

CPU_KV_BYTES = 1 << 30  # bytes of the KV cache there, unless the operator says otherwise
CPU_BLOCK_SIZE = 32  # tokens: the smallest that vLLM's attention on a CPU takes
KV_LEASE_SECONDS = (
    900  # seconds that prefilled blocks are kept at most: longer than any ticket for them
)
REFUSED_OPTIONS = {  # options that are Triptych's own to set, and what to say instead
    "--model": "name the model as Triptych's own argument",
    "--dtype": "use Triptych's --dtype",
    "--max-model-len": "use Triptych's --max-model-len",
    "--tokenizer": "Triptych reads the tokenizer, and it is the checkpoint's",
    "--enable-lora": "adapters are not served yet",
    "--headless": "Triptych's own processes are what vLLM's API servers would be",
    "--ec-transfer-config": "the pattern decides it; see --encoder",
    "--worker-extension-cls": "Triptych has one of its own",
    "--scheduler-cls": "Triptych has one of its own",
    "--config": "give its options one by one: Triptych reads no file of vLLM's",
    # The guard keeps requests that can't be computed again by their place in the queue, which
    # vLLM does not go by where requests have priorities; and Triptych's have none.
    "--scheduling-policy": "requests have no priorities, and are taken as they come",
    "--data-parallel-size": "a worker is one engine; ask for several workers, as in EPD*2",
    "--data-parallel-rank": "a worker is one engine; ask for several workers, as in EPD*2",
}
REFUSED_WHEN_SPLIT = {  # where prefill and decode are apart
    "--kv-transfer-config": "the pattern decides it where prefill and decode are apart",
}
SHORT_OPTIONS = {  # of vLLM's short forms, those whose long ones are above
    "-dp": "--data-parallel-size",
    "-dpn": "--data-parallel-rank",
}


def check_vllm_family(model: Model) -> None:
    served = models.served_by("vllm")
    if model.family not in served:
        raise UnsupportedModel(
            f"model_type '{model.family}' of {model.name} is not supported with vLLM here; "
            f"there are {', '.join(served)}"
        )


def checked_engine_args(config: Config, role: Role) -> list[str]:
    """The words of --engine-args; refused where one is Triptych's to set."""
    words = split_arguments(config.engine_args)
    refused = REFUSED_OPTIONS | (REFUSED_WHEN_SPLIT if role.span in ("P", "D") else {})
    for word in words:
        name = word.partition("=")[0].replace("_", "-")
        top = name.partition(".")[0]  # --kv-transfer-config.kv_role
        top = SHORT_OPTIONS.get(top, top)
        if top in refused:
            raise InvalidConfig(f"--engine-args {top} can't be given: {refused[top]}")
    return words


def vllm_environment(config: Config, role: Role, *, cpu: bool) -> dict[str, str]:
    """Variables that vLLM reads when it is loaded, unless the operator has set them.

    But for the port of a hand-over, since every worker of a host needs one of its own.
    """
    found = {
        "HF_HUB_OFFLINE": "1",  # a model is always a folder
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_LEVEL": "ERROR",
        "TRANSFORMERS_VERBOSITY": "error",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "1",
        # A process with threads that forks may leave locks behind that nobody opens.
        "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
    }
    host = config.worker_host
    if role.span in ("P", "D"):
        found["VLLM_NIXL_SIDE_CHANNEL_HOST"] = host
        if "UCX_TLS" not in os.environ and resolve_host(host).is_loopback:
            found["UCX_NET_DEVICES"] = "lo"  # NIXL's carrier would listen on every card
    if cpu:
        found["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"  # several workers share the cores
        if config.torch.threads:
            found["OMP_NUM_THREADS"] = str(config.torch.threads)
    found = {name: value for name, value in found.items() if name not in os.environ}
    if role.span in ("P", "D"):
        found["VLLM_NIXL_SIDE_CHANNEL_PORT"] = str(free_port(host, 0, "--worker-host"))
    return found


def vllm_arguments(config: Config, role: Role, model: Model, home: Path, *, cpu: bool) -> list[str]:
    """The options that Triptych sets, as ``vllm serve`` would be given them.

    ``home``: the worker's own folder, for what its processes pass each other by name.
    """
    found = [
        f"--model={model.folder}",
        f"--dtype={_dtype(config, cpu=cpu)}",
        "--disable-log-stats",  # vLLM's own log lines and metrics: Triptych reports
        "--mm-processor-cache-gb=0",  # of a processor that never runs
    ]
    if config.max_model_len:
        found.append(f"--max-model-len={config.max_model_len}")
    if cpu:
        found += [
            "--enforce-eager",
            "--skip-mm-profiling",
            f"--block-size={CPU_BLOCK_SIZE}",
            f"--kv-cache-memory-bytes={config.torch.kv_bytes or CPU_KV_BYTES}",
        ]
    elif config.gpu_memory_utilization:
        found.append(f"--gpu-memory-utilization={config.gpu_memory_utilization}")
    needs_tower = models.FAMILIES[model.family].vllm_needs_tower
    if not role.encodes and (role.span == "D" or not needs_tower):
        # No item comes with pixels: the towers are not even loaded.
        found.append(f"--limit-mm-per-prompt={json.dumps(dict.fromkeys(KINDS, 0))}")
    rows = _rows_in() if role.span else _rows_out(home)
    found.append(f"--ec-transfer-config={json.dumps(rows)}")
    found.append("--worker-extension-cls=triptych.engines.vllm.parts.WorkerExtension")
    if role.span in ("P", "D"):
        found.append(f"--kv-transfer-config={json.dumps(_kv_transfer(role, cpu=cpu))}")
    if role.span:
        found.append(f"--kv-events-config={json.dumps(_kv_events(home))}")
    return found


def _dtype(config: Config, *, cpu: bool) -> str:
    return "float32" if cpu and config.dtype == "auto" else config.dtype


def _rows_in() -> dict[str, Any]:
    """Embeddings come with a request: see ``connector``."""
    return {
        "ec_connector": "EmbeddingConnector",
        "ec_connector_module_path": "triptych.engines.vllm.connector",
        "ec_role": "ec_consumer",
        "engine_id": uuid.uuid4().hex,
    }


def _rows_out(home: Path) -> dict[str, Any]:
    """vLLM is an encoder alone, which writes embeddings to files: see ``producer``."""
    return {
        "ec_connector": "EmbeddingFileConnector",
        "ec_connector_module_path": "triptych.engines.vllm.producer",
        "ec_role": "ec_producer",
        "ec_connector_extra_config": {"shared_storage_path": str(home)},
        "engine_id": uuid.uuid4().hex,
    }


def _kv_events(home: Path) -> dict[str, Any]:
    """Published where nobody else can listen. The operator's own option comes later, and wins."""
    return {
        "enable_kv_cache_events": True,
        "publisher": "zmq",
        "endpoint": f"ipc://{home}/kv",
        "replay_endpoint": f"ipc://{home}/kv-again",
    }


def _kv_transfer(role: Role, *, cpu: bool) -> dict[str, Any]:
    found: dict[str, Any] = {
        "kv_connector": "NixlConnector",
        "kv_role": "kv_producer" if role.span == "P" else "kv_consumer",
        "engine_id": uuid.uuid4().hex,  # of this incarnation: a peer must not take it for another
        "kv_load_failure_policy": "fail",
        "kv_connector_extra_config": {"kv_lease_duration": KV_LEASE_SECONDS},
    }
    return found | ({"kv_buffer_device": "cpu"} if cpu else {})


def parse_engine_args(words: list[str]) -> AsyncEngineArgs:
    """vLLM's own reading of its options. One that it does not know is an InvalidConfig."""
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    class Parser(FlexibleArgumentParser):  # type: ignore[misc]
        def error(self, message: str) -> NoReturn:
            raise InvalidConfig(f"--engine-args: {message}")

    parser = AsyncEngineArgs.add_cli_args(Parser(prog="vllm", allow_abbrev=False))
    return AsyncEngineArgs.from_cli_args(parser.parse_args(words))
