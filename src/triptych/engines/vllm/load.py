"""Loads vLLM for a role: the door that ``engines.base.find("vllm")`` opens.

Runs in vLLM's own environment. What can be checked without vLLM is checked before it is imported,
which takes seconds.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

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
from triptych.engines.vllm import folder, options
from triptych.errors import InvalidConfig
from triptych.topology import Role

if TYPE_CHECKING:
    from triptych.engines.adapter.stock import ProcessorInputEncoder
    from triptych.engines.vllm.native import NativeEncoder
    from triptych.models.family import Family


SOCKET_FOLDER = "VLLM_RPC_BASE_PATH"  # where vLLM's processes meet; else among everybody's files
SOCKET_FOLDER_LENGTH = (
    64  # characters of a folder's name, so that those of sockets in it are not too long
)


def load(
    config: Config, role: Role, empty: AllocateOnGpu, progress: ReportProgress
) -> LoadedEngine:
    model = open_model(config.model, config.max_model_len)
    options.check_vllm_family(model)
    given = options.checked_engine_args(config, role)
    if not role.span and config.encoder == "torch":
        from triptych.engines.torch.load import load as load_torch

        return load_torch(config, role, empty, progress)
    progress("importing vLLM", 0.0)
    cpu = _on_cpu(config)
    os.environ.update(options.vllm_environment(config, role, cpu=cpu))
    home = folder.make_private_folder(config.run_dir)
    try:
        args = options.parse_engine_args(
            [*options.vllm_arguments(config, role, model, home, cpu=cpu), *given]
        )
        progress("starting vLLM's engine: weights, KV cache, graphs (may take minutes)", 0.0)
        with _sockets_in(home):
            loaded = _start(args, model, role, empty, home)
        loaded = dataclasses.replace(loaded, device="cpu" if cpu else "cuda")
    except BaseException:
        shutil.rmtree(home, ignore_errors=True)
        raise
    progress("starting vLLM's engine", 1.0)
    return loaded


@contextlib.contextmanager
def _sockets_in(home: Path) -> Iterator[None]:
    """For an engine that is started inside, unless the operator has named another place."""
    if SOCKET_FOLDER in os.environ or len(str(home)) > SOCKET_FOLDER_LENGTH:
        yield
        return
    os.environ[SOCKET_FOLDER] = str(home)
    try:
        yield
    finally:
        del os.environ[SOCKET_FOLDER]


def _on_cpu(config: Config) -> bool:
    """Whether this environment's vLLM is one for CPUs: it is built for these or for GPUs."""
    from vllm.platforms import current_platform

    cpu = bool(current_platform.is_cpu())
    if config.device != "auto" and cpu != (config.device == "cpu"):
        built = "CPUs" if cpu else current_platform.device_type
        raise InvalidConfig(
            f"--device {config.device}: the vLLM of this environment is for {built}"
        )
    return cpu


def _start(args: Any, model: Model, role: Role, empty: Allocate, home: Path) -> LoadedEngine:
    from vllm.v1.engine.async_llm import AsyncLLM

    from triptych import models
    from triptych.engines.adapter.stored import checkpoint_sizes
    from triptych.engines.vllm import events
    from triptych.engines.vllm.engine import VllmEngine
    from triptych.engines.vllm.inputs import VllmInputs
    from triptych.engines.vllm.statistics import VllmStatistics

    family = models.find_family(model)
    vllm_config = _complete(args)
    statistics = VllmStatistics()
    try:
        llm = AsyncLLM.from_vllm_config(
            vllm_config,
            stat_loggers=[lambda *_: statistics],
            disable_log_stats=True,
        )
    except RuntimeError as error:  # of its own processes, which have told why
        raise InvalidConfig(
            f"vLLM can't start with this model and these options: {error}"
        ) from error
    listener = events.kv_listener_of(vllm_config)
    sizes = checkpoint_sizes(family, model)
    engine = VllmEngine(llm, VllmInputs(model, family), model, statistics, empty, sizes, listener)
    encoder: ProcessorInputEncoder | NativeEncoder | None = None
    if role.encodes:
        encoder = _stock(vllm_config, model, family, empty)
        if not role.span:
            from triptych.engines.vllm.native import NativeEncoder

            encoder = NativeEncoder(engine, encoder, model, home, empty)

    def report() -> EngineReport:
        return with_encoder_stats(engine.report(), encoder)

    def close() -> None:
        engine.close()
        if encoder is not None:
            encoder.close()
        shutil.rmtree(home, ignore_errors=True)

    if not role.span:
        return LoadedEngine(encoder, None, report, close, engine.died)
    return LoadedEngine(encoder, engine, report, close, engine.died, engine.cache)


def _complete(args: Any) -> Any:
    """All of vLLM's configuration, with the guard in it."""
    from vllm.usage.usage_lib import UsageContext

    from triptych.engines.vllm import guard

    try:
        vllm_config = args.create_engine_config(UsageContext.ENGINE_CONTEXT)
    except ValueError as error:  # pydantic's too
        raise InvalidConfig(f"vLLM refuses its options: {error}") from None
    guard.install_scheduler(vllm_config)
    return vllm_config


def _stock(
    vllm_config: Any, model: Model, family: Family, empty: Allocate
) -> ProcessorInputEncoder:
    from triptych.engines.adapter.stock import ProcessorInputEncoder
    from triptych.models import FAMILIES
    from triptych.models.tensors import DTYPE_NAMES

    model_config = vllm_config.model_config
    media = model_config.multimodal_config
    raw = bool(media is not None and media.mm_device_do_normalize)
    return ProcessorInputEncoder(
        family,
        DTYPE_NAMES[model_config.dtype],
        empty,
        model_config.max_model_len,
        raw=raw,
        kinds=FAMILIES[model.family].vllm_fields or (),
    )
