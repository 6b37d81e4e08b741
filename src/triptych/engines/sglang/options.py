"""A worker's settings as SGLang's own options and environment variables.

The operator's --engine-args come after Triptych's options. SGLang's own parser reads them, so they
mean the same as in `sglang serve`.
"""

from __future__ import annotations

import argparse
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any, NoReturn

import torch

from triptych.checkpoint import Model
from triptych.config import Config
from triptych.engines.adapter.arguments import (
    refuse_arguments,
    sets_gpu_memory,
    split_arguments,
)
from triptych.engines.torch.load import choose_device, choose_dtype
from triptych.errors import InvalidConfig
from triptych.host import free_port, resolve_host
from triptych.models.tensors import DTYPE_NAMES
from triptych.runtime.gpus import GpuInfo, visible_gpus
from triptych.topology import Role

# SGLang reserves some tokens of a context. Triptych sets a context that is longer by these, and
# limits requests to the one that the operator set.
CONTEXT_MARGIN = 8
STATIC = 0.88  # of a worker's share of a GPU; activations and CUDA graphs take the rest
LEAST_STATIC, MOST_STATIC = 0.05, 0.88
LOOPBACK = "lo"
DISAGGREGATION_MODES = {"P": "prefill", "D": "decode", "PD": "null"}
SET_BY_TRIPTYCH = {
    "--model-path": "give MODEL",
    "--model": "give MODEL",
    "--config": "give the options themselves",
    "--context-length": "give --max-model-len",
    "--host": "give --worker-host",
    "--device": "give --device",
    "--dtype": "give --dtype",
    "--base-gpu-id": "give --device",
    "--disaggregation-mode": "give --pattern",
    "--disaggregation-bootstrap-port": "every worker chooses its own",
    "--skip-tokenizer-init": "it is always set",
    "--incremental-streaming-output": "it is always set",
    "--encoder-only": "give --pattern",
    "--language-only": "give --pattern",
    "--tokenizer-worker-num": "SGLang's tokenizer does not run",
}


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise InvalidConfig(f"--engine-args: {message} (as SGLang reads them)")


def server_args(config: Config, role: Role, model: Model) -> Any:
    """SGLang's ServerArgs for a worker of this role."""
    from sglang.srt.server_args import prepare_server_args

    given = split_arguments(config.engine_args)
    refuse_arguments(given, SET_BY_TRIPTYCH)
    words = [*_triptychs_options(config, role, model), *given]
    parse_server_args(words)
    try:
        return prepare_server_args(words)
    except (ValueError, AssertionError) as error:  # values that contradict each other
        raise InvalidConfig(f"SGLang refuses its options: {error}") from None


def parse_server_args(words: Sequence[str]) -> argparse.Namespace:
    """Refuse options that SGLang does not know, and abbreviations."""
    from sglang.srt.server_args import ServerArgs

    parser = _Parser(prog="sglang", allow_abbrev=False, add_help=False)
    ServerArgs.add_cli_args(parser)
    return parser.parse_args(words)


def static_fraction(config: Config) -> float:
    """The worker's share of a GPU in SGLang's terms: the fraction of the memory that is free at its
    start, for weights and KV cache.

    Called after other workers and this worker's encoder have allocated theirs.
    """
    [gpu, *_] = visible_gpus(free=True).found or [GpuInfo("", 1, 1)]
    encoder = torch.cuda.memory_reserved()  # in this process
    share = gpu.memory * config.gpu_memory_utilization - encoder
    return min(MOST_STATIC, max(LEAST_STATIC, STATIC * share / max(gpu.free, 1)))


def _triptychs_options(config: Config, role: Role, model: Model) -> list[str]:
    device = choose_device(config.device)
    words = [
        f"--model-path={model.folder}",
        f"--dtype={DTYPE_NAMES[choose_dtype(config.dtype, model, device)]}",
        f"--device={device.type}",
        f"--host={config.worker_host}",
        f"--context-length={model.context + CONTEXT_MARGIN}",
        f"--disaggregation-mode={DISAGGREGATION_MODES[role.phases]}",
        "--disaggregation-transfer-backend=nixl",
        "--skip-tokenizer-init",  # the frontend tokenizes and detokenizes
        "--incremental-streaming-output",
        "--log-level=warning",
    ]
    if device.type == "cuda" and config.gpu_memory_utilization and not sets_gpu_memory(config):
        words.append(f"--mem-fraction-static={static_fraction(config):.3f}")
    if role.phases == "P":
        words.append(f"--disaggregation-bootstrap-port={free_port(config.worker_host, 0)}")
    return words


def sglang_environment(
    host: str, arguments: Any, folder: Path, given: Collection[str]
) -> dict[str, str]:
    """Variables that make SGLang's processes listen at the worker's own address only.

    Their sockets authenticate nobody. By default they listen at the address of the network card,
    and torch's store, where ranks find each other, listens at all addresses.
    ``arguments``: SGLang's ServerArgs. ``folder``: this engine's own. ``given``: variables that the
    operator has set; they stay as they are.
    """
    found: dict[str, str] = {}
    where = resolve_host(host)  # numeric, because a ZeroMQ socket takes no host names
    if not where.is_unspecified:  # else SGLang chooses an address that others can reach
        found["SGLANG_HOST_IP"] = str(where)
    if arguments.nnodes == 1:
        if arguments.dp_size == 1 and arguments.dist_init_addr is None:
            # Ranks meet in a file. Several data-parallel groups would each need their own.
            found["SGLANG_DISTRIBUTED_INIT_METHOD_OVERRIDE"] = f"file://{folder / 'ranks'}"
            # SGLang's CPU kernels name shared memory by these: no two engines may share them.
            found["MASTER_ADDR"] = str(where)
            found["MASTER_PORT"] = str(free_port(host, 0, "--worker-host"))
        if where.is_loopback:
            found["GLOO_SOCKET_IFNAME"] = found["NCCL_SOCKET_IFNAME"] = LOOPBACK
            if "UCX_TLS" not in given:
                found["UCX_NET_DEVICES"] = LOOPBACK
    return {name: value for name, value in found.items() if name not in given}
