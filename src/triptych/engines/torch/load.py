"""Loads the parts that a role needs: the encoder's weights for E, the language model's for P and D.

``engines.base.find("torch")`` imports this module.
"""

from __future__ import annotations

import dataclasses
import functools

import torch

from triptych import models
from triptych.checkpoint import Model, open_model
from triptych.config import Config
from triptych.engines.base import (
    Allocate,
    AllocateOnGpu,
    EngineReport,
    LoadedEngine,
    ReportProgress,
    with_encoder_stats,
)
from triptych.engines.torch import memory, packed_linear, weights
from triptych.engines.torch.attention import ATTENTION_NAME
from triptych.engines.torch.encoder import TorchEncoder
from triptych.engines.torch.engine import TorchEngine
from triptych.errors import InvalidConfig
from triptych.messages import ParameterCounts
from triptych.models.tensors import TORCH_DTYPES
from triptych.topology import Role


def load(config: Config, role: Role, lend: AllocateOnGpu, progress: ReportProgress) -> LoadedEngine:
    if config.cpu_threads:
        torch.set_num_threads(config.cpu_threads)
    model = open_model(config.model, config.max_model_len)
    if role.phases:
        model = models.limit_context(model, config.max_model_len)
    family = models.find_family(model)
    device = choose_device(config.device)
    dtype = choose_dtype(config.dtype, model, device)
    if device.type == "cpu":
        memory.retain_freed_memory()
    # Other engines, whose encoder this may be, take arrays of the host alone.
    gpu = gpu_of(device) if config.engine == "torch" else None
    empty: Allocate = lend if gpu is None else functools.partial(lend, gpu=gpu)
    encoder, engine = None, None
    parameters = {"encoder": 0, "language": 0}
    if role.encodes:
        module = weights.load_part(family, model, "encoder", device, dtype, progress)
        parameters["encoder"] = weights.count_parameters(module)
        packed_linear.pack_linear_layers(module)
        encoder = TorchEncoder(family, module, model.context, config.torch, empty)
    if role.phases:
        module = weights.load_part(
            family, model, "language", device, dtype, progress, attention=ATTENTION_NAME
        )
        parameters["language"] = weights.count_parameters(module)
        packed_linear.pack_linear_layers(module)
        language = family.language(module)
        settings = memory.size_kv_cache(config, language, model, device)
        engine = TorchEngine(
            language,
            family.layout,
            model,
            settings,
            empty,
            grammar_seconds=config.limits.grammar_seconds,
        )
    parts = ParameterCounts(**parameters)

    def report() -> EngineReport:
        own = EngineReport() if engine is None else engine.report()
        return with_encoder_stats(dataclasses.replace(own, parameters=parts), encoder)

    def close() -> None:
        for part in (engine, encoder):
            if part is not None:
                part.close()

    cache, resumes = engine.cache if engine else None, engine is not None
    lent = 0 if gpu is None else memory.transfer_bytes(config, device)
    return LoadedEngine(
        encoder,
        engine,
        report,
        close,
        cache=cache,
        resumes=resumes,
        gpu=gpu,
        gpu_lent=lent,
        device=device.type,
    )


def choose_device(name: str) -> torch.device:
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise InvalidConfig(f"device '{name}' is unknown; say cpu, cuda or cuda:1") from None
    if device.type == "cuda" and not torch.cuda.is_available():
        raise InvalidConfig(f"device '{name}' is not there: torch finds no CUDA. Say cpu.")
    return device


def gpu_of(device: torch.device) -> int | None:
    """The GPU's number, as CUDA counts in this process; None if the device is not a CUDA GPU."""
    if device.type != "cuda":
        return None
    return torch.cuda.current_device() if device.index is None else device.index


def choose_dtype(name: str, model: Model, device: torch.device) -> torch.dtype:
    """``auto``: the reference on a CPU, what the checkpoint was made in on a GPU."""
    if name != "auto":
        return TORCH_DTYPES[name]
    if device.type == "cpu":
        return torch.float32
    text = model.config.get("text_config") or {}
    for config in (model.config, text):
        for key in ("dtype", "torch_dtype"):
            if (stored := config.get(key)) in ("float32", "bfloat16", "float16"):
                return TORCH_DTYPES[stored]
    return torch.bfloat16
