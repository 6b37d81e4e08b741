"""A worker's settings as vLLM's own options and environment variables.

The operator's --engine-args come after Triptych's options and so override them; options that only
Triptych can set are refused. Imports vLLM only to parse its options.
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
from triptych.engines.adapter.arguments import refuse_arguments, split_arguments
from triptych.errors import InvalidConfig
from triptych.host import free_port, resolve_host
from triptych.topology import Role

if TYPE_CHECKING:
    from vllm.engine.arg_utils import AsyncEngineArgs

CPU_KV_BYTES = 1 << 30  # of the KV cache on a CPU, unless the operator sets it
CPU_BLOCK_SIZE = 32  # tokens: the smallest that vLLM's attention on a CPU takes
KV_LEASE_SECONDS = 900  # how long vLLM keeps prefilled blocks: longer than any ticket
REFUSED_OPTIONS = {  # options that Triptych sets, and what to do instead
    "--model": "name the model as Triptych's own argument",
    "--dtype": "use Triptych's --dtype",
    "--max-model-len": "use Triptych's --max-model-len",
    "--tokenizer": "the tokenizer is the checkpoint's, and Triptych reads it",
    "--enable-lora": "LoRA adapters are not served yet",
    "--headless": "Triptych's frontend takes the place of vLLM's API servers",
    "--ec-transfer-config": "the pattern sets it; see --encoder",
    "--worker-extension-cls": "Triptych has its own extension",
    "--scheduler-cls": "Triptych has its own scheduler",
    "--config": "give its options one by one",
    # The scheduler protects bare requests by their position in the queue, which vLLM ignores under
    # its priority policy.
    "--scheduling-policy": "requests have no priorities; the order of arrival counts",
    "--data-parallel-size": "a worker is one engine; ask for several workers, as in EPD*2",
    "--data-parallel-rank": "a worker is one engine; ask for several workers, as in EPD*2",
}
REFUSED_WHEN_SPLIT = {  # with prefill and decode in separate workers
    "--kv-transfer-config": "the pattern sets it when prefill and decode are separate",
}
SHORT_OPTIONS = {  # short forms of refused options
    "-dp": "--data-parallel-size",
    "-dpn": "--data-parallel-rank",
}


def checked_engine_args(config: Config, role: Role) -> list[str]:
    """The words of --engine-args; InvalidConfig if one is an option that Triptych sets."""
    words = split_arguments(config.engine_args)
    refused = REFUSED_OPTIONS | (REFUSED_WHEN_SPLIT if role.phases in ("P", "D") else {})
    refuse_arguments(words, refused, _option)
    return words


def _option(name: str) -> str:
    top = name.partition(".")[0]  # --kv-transfer-config.kv_role
    return SHORT_OPTIONS.get(top, top)


def vllm_environment(config: Config, role: Role, *, cpu: bool) -> dict[str, str]:
    """Variables that vLLM reads when it is imported, without those that the operator has set.

    The port of the NIXL side channel is always set: every worker of a host needs its own.
    """
    found = {
        "HF_HUB_OFFLINE": "1",  # a model is always a local folder
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_LEVEL": "ERROR",
        "TRANSFORMERS_VERBOSITY": "error",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "1",
        # A fork of a process with threads may inherit locks that are never released.
        "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
    }
    host = config.worker_host
    if role.phases in ("P", "D"):
        found["VLLM_NIXL_SIDE_CHANNEL_HOST"] = host
        if "UCX_TLS" not in os.environ and resolve_host(host).is_loopback:
            found["UCX_NET_DEVICES"] = "lo"  # else UCX listens on every interface
    if cpu:
        found["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"  # several workers share the cores
        if config.cpu_threads:
            found["OMP_NUM_THREADS"] = str(config.cpu_threads)
    found = {name: value for name, value in found.items() if name not in os.environ}
    if role.phases in ("P", "D"):
        found["VLLM_NIXL_SIDE_CHANNEL_PORT"] = str(free_port(host, 0, "--worker-host"))
    return found


def vllm_arguments(
    config: Config, role: Role, model: Model, folder: Path, *, cpu: bool
) -> list[str]:
    """The options that Triptych sets, as for ``vllm serve``.

    ``folder``: the worker's own, for sockets and files between its processes.
    """
    dtype = "float32" if cpu and config.dtype == "auto" else config.dtype
    found = [
        f"--model={model.folder}",
        f"--dtype={dtype}",
        "--disable-log-stats",  # Triptych reports the metrics
        "--mm-processor-cache-gb=0",  # vLLM's processor never runs
    ]
    if config.max_model_len:
        found.append(f"--max-model-len={config.max_model_len}")
    if cpu:
        found += [
            "--enforce-eager",
            "--skip-mm-profiling",
            f"--block-size={CPU_BLOCK_SIZE}",
            f"--kv-cache-memory-bytes={config.kv_cache_bytes or CPU_KV_BYTES}",
        ]
    elif config.gpu_memory_utilization:
        found.append(f"--gpu-memory-utilization={config.gpu_memory_utilization}")
    needs_tower = models.FAMILIES[model.family].vllm_needs_tower
    if not role.encodes and (role.phases == "D" or not needs_tower):
        # No item comes with pixels: vLLM does not load the towers.
        found.append(f"--limit-mm-per-prompt={json.dumps(dict.fromkeys(KINDS, 0))}")
    found.append(f"--ec-transfer-config={json.dumps(_embedding_connector(role, folder))}")
    found.append("--worker-extension-cls=triptych.engines.vllm.extension.WorkerExtension")
    if role.phases in ("P", "D"):
        found.append(f"--kv-transfer-config={json.dumps(_kv_transfer(role, cpu=cpu))}")
    if role.phases:
        found.append(f"--kv-events-config={json.dumps(_kv_events(folder))}")
    return found


def _embedding_connector(role: Role, folder: Path) -> dict[str, Any]:
    """Requests bring embeddings; in role E vLLM writes them to files: see ``connector``."""
    found: dict[str, Any] = {
        "ec_connector": "EmbeddingConnector" if role.phases else "EmbeddingFileConnector",
        "ec_connector_module_path": "triptych.engines.vllm.connector",
        "ec_role": "ec_consumer" if role.phases else "ec_producer",
        "engine_id": uuid.uuid4().hex,
    }
    files = {"ec_connector_extra_config": {"shared_storage_path": str(folder)}}
    return found if role.phases else found | files


def _kv_events(folder: Path) -> dict[str, Any]:
    """Published in a folder that only this user can read. The operator's option overrides it."""
    return {
        "enable_kv_cache_events": True,
        "publisher": "zmq",
        "endpoint": f"ipc://{folder}/kv",
        "replay_endpoint": f"ipc://{folder}/kv-replay",
    }


def _kv_transfer(role: Role, *, cpu: bool) -> dict[str, Any]:
    found: dict[str, Any] = {
        "kv_connector": "NixlConnector",
        "kv_role": "kv_producer" if role.phases == "P" else "kv_consumer",
        "engine_id": uuid.uuid4().hex,  # new for every start: peers must not mix up incarnations
        "kv_load_failure_policy": "fail",
        "kv_connector_extra_config": {"kv_lease_duration": KV_LEASE_SECONDS},
    }
    return found | ({"kv_buffer_device": "cpu"} if cpu else {})


def parse_engine_args(words: list[str]) -> AsyncEngineArgs:
    """Parsed by vLLM itself. An option that it does not know is an InvalidConfig."""
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    class Parser(FlexibleArgumentParser):  # type: ignore[misc]
        def error(self, message: str) -> NoReturn:
            raise InvalidConfig(f"--engine-args: {message}")

    parser = AsyncEngineArgs.add_cli_args(Parser(prog="vllm", allow_abbrev=False))
    return AsyncEngineArgs.from_cli_args(parser.parse_args(words))
