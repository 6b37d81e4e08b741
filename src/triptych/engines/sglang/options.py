"""The options that SGLang is started with: what Triptych decides, then what the operator asks for.

Parsed by SGLang's own parser, so that ``--engine-args`` means what it means in `sglang serve`.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any, NoReturn

import torch

from triptych.checkpoint import Model
from triptych.config import Config
from triptych.engines.adapter.arguments import sets_gpu_memory, split_arguments
from triptych.engines.torch.load import choose_device, choose_dtype
from triptych.errors import InvalidConfig
from triptych.host import free_port
from triptych.models.tensors import DTYPE_NAMES
from triptych.runtime.gpus import GpuInfo, visible_gpus
from triptych.topology import Role

# SGLang keeps some tokens of a context for itself. What we ask for is more by these, and requests
# are held to what the operator asked for.
CONTEXT_MARGIN = 8
STATIC = 0.88  # of a share; the rest is for the values of a step and for CUDA graphs
LEAST_STATIC, MOST_STATIC = 0.05, 0.88
DISAGGREGATION_MODES = {"P": "prefill", "D": "decode", "PD": "null"}
SET_BY_TRIPTYCH = {
    "--model-path": "MODEL",
    "--model": "MODEL",
    "--config": "the options themselves",
    "--context-length": "--max-model-len",
    "--host": "--worker-host",
    "--device": "--device",
    "--dtype": "--dtype",
    "--base-gpu-id": "--device",
    "--disaggregation-mode": "--pattern",
    "--disaggregation-bootstrap-port": "nothing: every worker chooses its own",
    "--skip-tokenizer-init": "nothing: it is always so",
    "--incremental-streaming-output": "nothing: it is always so",
    "--encoder-only": "--pattern",
    "--language-only": "--pattern",
    "--tokenizer-worker-num": "nothing: tokens never come through there",
}


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise InvalidConfig(f"--engine-args: {message} (as SGLang reads them)")


def server_args(config: Config, role: Role, model: Model) -> Any:
    """SGLang's ServerArgs of a worker of this role."""
    from sglang.srt.server_args import prepare_server_args

    words = [*_decided(config, role, model), *_asked(config.engine_args)]
    parse_server_args(words)
    try:
        return prepare_server_args(words)
    except (ValueError, AssertionError) as error:  # of values that do not go together
        raise InvalidConfig(f"SGLang refuses its options: {error}") from None


def parse_server_args(words: Sequence[str]) -> argparse.Namespace:
    """Refuse what SGLang does not know. Nothing is abbreviated: so much is not guessed."""
    from sglang.srt.server_args import ServerArgs

    parser = _Parser(prog="sglang", allow_abbrev=False, add_help=False)
    ServerArgs.add_cli_args(parser)
    return parser.parse_args(words)


def _asked(text: str) -> list[str]:
    words = split_arguments(text)
    for word in words:
        name = word.partition("=")[0].replace("_", "-")
        if name in SET_BY_TRIPTYCH:
            raise InvalidConfig(
                f"--engine-args: {name} is Triptych's to set. Give {SET_BY_TRIPTYCH[name]}."
            )
    return words


def static_fraction(config: Config) -> float:
    """The worker's share as SGLang counts: weights and KV cache, of what is free when it starts.

    Read when other workers have taken theirs, this one's encoder included.
    """
    [gpu, *_] = visible_gpus(free=True).found or [GpuInfo("", 1, 1)]
    taken = torch.cuda.memory_reserved()  # by the encoder in this process; 0: there is none
    share = gpu.memory * config.gpu_memory_utilization - taken
    return min(MOST_STATIC, max(LEAST_STATIC, STATIC * share / max(gpu.free, 1)))


def _decided(config: Config, role: Role, model: Model) -> list[str]:
    device = choose_device(config.device)
    words = [
        f"--model-path={model.folder}",
        f"--dtype={DTYPE_NAMES[choose_dtype(config.dtype, model, device)]}",
        f"--device={device.type}",
        f"--host={config.worker_host}",
        f"--context-length={model.context + CONTEXT_MARGIN}",
        f"--disaggregation-mode={DISAGGREGATION_MODES[role.span]}",
        "--disaggregation-transfer-backend=nixl",
        "--skip-tokenizer-init",  # our frontend makes tokens of words, and words of tokens
        "--incremental-streaming-output",
        "--log-level=warning",
    ]
    if device.type == "cuda" and config.gpu_memory_utilization and not sets_gpu_memory(config):
        words.append(f"--mem-fraction-static={static_fraction(config):.3f}")
    if role.span == "P":
        words.append(f"--disaggregation-bootstrap-port={free_port(config.worker_host, 0)}")
    return words
