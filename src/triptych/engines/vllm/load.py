"""Loads vLLM for a role, in vLLM's own environment.

What can be checked without vLLM is checked before the import, which takes seconds.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from triptych.checkpoint import Model, open_model
from triptych.config import Config
from triptych.engines.adapter.kv_events import KvListener
from triptych.engines.base import (
    Allocate,
    AllocateOnGpu,
    EngineReport,
    LoadedEngine,
    ReportProgress,
    with_encoder_stats,
)
from triptych.engines.checks import check_family
from triptych.engines.vllm import options
from triptych.errors import InvalidConfig
from triptych.topology import Role

if TYPE_CHECKING:
    from triptych.engines.adapter.processor_inputs import ProcessorInputEncoder
    from triptych.engines.vllm.native_encoder import NativeEncoder
    from triptych.models.family import Family


FOLDER_PREFIX = "vllm-"
SOCKET_FOLDER = "VLLM_RPC_BASE_PATH"  # where vLLM's processes put their sockets; default: /tmp
SOCKET_FOLDER_LENGTH = 64  # characters, so that paths of sockets in it are not too long


def load(
    config: Config, role: Role, allocate: AllocateOnGpu, progress: ReportProgress
) -> LoadedEngine:
    model = open_model(config.model, config.max_model_len)
    check_family("vllm", model)
    given = options.checked_engine_args(config, role)
    if not role.phases and config.encoder == "torch":
        from triptych.engines.torch.load import load as load_torch

        return load_torch(config, role, allocate, progress)
    progress("importing vLLM", 0.0)
    cpu = _on_cpu(config)
    os.environ.update(options.vllm_environment(config, role, cpu=cpu))
    with contextlib.ExitStack() as on_failure:
        folder = make_private_folder(config.run_dir)
        on_failure.callback(shutil.rmtree, folder, ignore_errors=True)
        ours = options.vllm_arguments(config, role, model, folder, cpu=cpu)
        args = options.parse_engine_args([*ours, *given])
        progress("starting vLLM's engine: weights, KV cache, graphs (may take minutes)", 0.0)
        with _sockets_in(folder):
            loaded = _start(args, model, role, allocate, folder)
        on_failure.pop_all()
    progress("starting vLLM's engine", 1.0)
    return dataclasses.replace(loaded, device="cpu" if cpu else "cuda")


def make_private_folder(run_dir: str) -> Path:
    """A new folder for sockets and files between this process and vLLM's; the caller removes it.

    Removes the folders of workers that were killed.
    """
    parent = Path(run_dir or tempfile.gettempdir())
    for other in parent.glob(f"{FOLDER_PREFIX}*-*"):
        owner = other.name.removeprefix(FOLDER_PREFIX).partition("-")[0]
        if owner.isdigit() and not os.path.exists(f"/proc/{owner}"):
            shutil.rmtree(other, ignore_errors=True)
    return Path(tempfile.mkdtemp(prefix=f"{FOLDER_PREFIX}{os.getpid()}-", dir=parent))


@contextlib.contextmanager
def _sockets_in(folder: Path) -> Iterator[None]:
    """An engine that is started inside puts its sockets here, unless the operator says where."""
    if SOCKET_FOLDER in os.environ or len(str(folder)) > SOCKET_FOLDER_LENGTH:
        yield
        return
    os.environ[SOCKET_FOLDER] = str(folder)
    try:
        yield
    finally:
        del os.environ[SOCKET_FOLDER]


def _on_cpu(config: Config) -> bool:
    """Whether the vLLM of this environment is built for CPUs; else it is built for GPUs."""
    from vllm.platforms import current_platform

    cpu = bool(current_platform.is_cpu())
    if config.device != "auto" and cpu != (config.device == "cpu"):
        built = "CPUs" if cpu else current_platform.device_type
        raise InvalidConfig(
            f"--device {config.device}: the vLLM of this environment is built for {built}"
        )
    return cpu


def _start(args: Any, model: Model, role: Role, allocate: Allocate, folder: Path) -> LoadedEngine:
    from vllm.v1.engine.async_llm import AsyncLLM

    from triptych import models
    from triptych.engines.adapter.base import checkpoint_sizes
    from triptych.engines.vllm.engine import VllmEngine, VllmStatistics
    from triptych.engines.vllm.inputs import VllmInputs

    family = models.find_family(model)
    vllm_config = _complete_config(args)
    statistics = VllmStatistics()
    try:
        llm = AsyncLLM.from_vllm_config(
            vllm_config,
            stat_loggers=[lambda *_: statistics],
            disable_log_stats=True,
        )
    except RuntimeError as error:  # vLLM's processes have logged the reason
        raise InvalidConfig(
            f"vLLM does not start with this model and these options: {error}"
        ) from error
    listener = kv_listener_of(vllm_config)
    sizes = checkpoint_sizes(family, model)
    inputs = VllmInputs(model, family)
    engine = VllmEngine(llm, inputs, model, statistics, allocate, sizes, listener)
    encoder: ProcessorInputEncoder | NativeEncoder | None = None
    if role.encodes:
        encoder = _input_encoder(vllm_config, model, family, allocate)
        if not role.phases:
            from triptych.engines.vllm.native_encoder import NativeEncoder

            encoder = NativeEncoder(engine, encoder, model, folder, allocate)

    def report() -> EngineReport:
        return with_encoder_stats(engine.report(), encoder)

    def close() -> None:
        engine.close()
        if encoder is not None:
            encoder.close()
        shutil.rmtree(folder, ignore_errors=True)

    if not role.phases:
        return LoadedEngine(encoder, None, report, close, engine.died)
    return LoadedEngine(encoder, engine, report, close, engine.died, engine.cache)


def _complete_config(args: Any) -> Any:
    """vLLM's whole configuration, with Triptych's scheduler."""
    from vllm.usage.usage_lib import UsageContext

    from triptych.engines.vllm.extension import install_scheduler

    try:
        vllm_config = args.create_engine_config(UsageContext.ENGINE_CONTEXT)
    except ValueError as error:  # pydantic's too
        raise InvalidConfig(f"vLLM refuses its options: {error}") from None
    install_scheduler(vllm_config)
    return vllm_config


def kv_listener_of(vllm_config: Any) -> KvListener | None:
    """For an engine of this (complete) configuration; None if it publishes no KV events.

    The operator may set the endpoints with --engine-args.
    """
    events = vllm_config.kv_events_config
    caches = vllm_config.cache_config.enable_prefix_caching
    if not caches or events is None or not events.enable_kv_cache_events:
        return None
    if events.publisher != "zmq":
        return None
    replay = events.replay_endpoint
    return KvListener(_connectable(events.endpoint), replay and _connectable(replay))


def _connectable(endpoint: str) -> str:
    """The address to connect to, of an address that the engine binds."""
    return endpoint.replace("//*:", "//127.0.0.1:")


def _input_encoder(
    vllm_config: Any, model: Model, family: Family, allocate: Allocate
) -> ProcessorInputEncoder:
    from triptych.engines.adapter.processor_inputs import ProcessorInputEncoder
    from triptych.models import FAMILIES
    from triptych.models.tensors import DTYPE_NAMES

    model_config = vllm_config.model_config
    media = model_config.multimodal_config
    return ProcessorInputEncoder(
        family,
        DTYPE_NAMES[model_config.dtype],
        allocate,
        model_config.max_model_len,
        raw=bool(media is not None and media.mm_device_do_normalize),
        kinds=FAMILIES[model.family].vllm_fields or (),
    )
