"""Loads TensorRT-LLM for a role, in TensorRT-LLM's own environment.

In role E, Triptych's own encoder encodes all kinds of media; with ``--encoder native``
TensorRT-LLM's encoder encodes images.
"""

from __future__ import annotations

import asyncio
import functools
import logging
from typing import Any

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
from triptych.engines.checks import check_family
from triptych.engines.torch.encoder import with_embeds_recipes
from triptych.engines.torch.load import choose_dtype
from triptych.engines.torch.load import load as load_torch
from triptych.engines.trtllm import options
from triptych.engines.trtllm.api import WRITTEN_FOR, TrtApi, import_trtllm
from triptych.engines.trtllm.encoder import ImagePassthrough, TrtVisionEncoder
from triptych.engines.trtllm.engine import TrtEngine
from triptych.engines.trtllm.monitor import ExecutorMonitor
from triptych.engines.trtllm.requests import TrtPromptBuilder
from triptych.errors import InvalidConfig, UnsupportedModel
from triptych.models.family import Family
from triptych.models.tensors import DTYPE_NAMES
from triptych.recipe import Recipes
from triptych.topology import Role

log = logging.getLogger(__name__)


def load(
    config: Config, role: Role, allocate: AllocateOnGpu, progress: ReportProgress
) -> LoadedEngine:
    if role == "E" and config.encoder == "torch":
        return load_torch(config, role, allocate, progress)
    model = models.limit_context(
        open_model(config.model, config.max_model_len), config.max_model_len
    )
    check_family("trtllm", model)
    if config.device not in ("auto", "cuda"):
        raise InvalidConfig(
            f"--device {config.device}: TensorRT-LLM runs on CUDA devices only, on those of "
            "CUDA_VISIBLE_DEVICES"
        )
    api = import_trtllm()
    log.warning(
        "the adapter of TensorRT-LLM was written from the interface of version %s and never run "
        "against TensorRT-LLM; this is version %s",
        WRITTEN_FOR,
        api.version,
    )
    arguments = options.llm_arguments(api, config, role, model)
    progress("starting TensorRT-LLM", 0.0)
    family = models.find_family(model)
    dtype = DTYPE_NAMES[choose_dtype(config.dtype, model, torch.device("cuda"))]
    recipes = with_embeds_recipes(family.recipes, family.width, dtype)
    died = asyncio.Event()
    if role == "E":
        native = _construct(api.encoder, arguments)
        monitor = ExecutorMonitor(native, died)
        encoder = TrtVisionEncoder(api, native, model, recipes, family.width, monitor, allocate)
        stats = functools.partial(with_encoder_stats, EngineReport(), encoder)
        loaded = LoadedEngine(encoder, None, stats, encoder.close, died)
    else:
        loaded = _load_engine(api, arguments, role, model, family, recipes, allocate, died)
    progress("starting TensorRT-LLM", 1.0)
    return loaded


def _load_engine(
    api: TrtApi,
    arguments: dict[str, Any],
    role: Role,
    model: Model,
    family: Family,
    recipes: Recipes,
    allocate: Allocate,
    died: asyncio.Event,
) -> LoadedEngine:
    llm = _construct(api.llm, arguments)
    prompts = TrtPromptBuilder(api, llm, family.width)
    if not prompts.takes_embeddings:
        recipes = family.recipes
        if not role.encodes and "P" in role.phases:
            llm.shutdown()
            raise UnsupportedModel(
                f"TensorRT-LLM takes no embeddings for {model.name} ({model.family}), so its "
                "encoder must share a worker with prefill: choose --pattern EPD or EP/D"
            )
    engine = TrtEngine(api, llm, model, family, prompts, ExecutorMonitor(llm, died), allocate)
    encoder = ImagePassthrough(recipes, model.context, allocate) if role.encodes else None
    return LoadedEngine(
        encoder, engine, lambda: with_encoder_stats(engine.report(), encoder), engine.close, died
    )


def _construct(kind: Any, arguments: dict[str, Any]) -> Any:
    try:
        return kind(**arguments)
    except (ValueError, NotImplementedError) as error:  # models and settings that it refuses
        raise InvalidConfig(f"TensorRT-LLM does not start: {error}") from error
