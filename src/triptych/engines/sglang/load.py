"""Loads SGLang for a role, in SGLang's own environment.

The built-in encoder encodes media in every pattern, so that all patterns give the same tokens.
SGLang's own towers differ from those of transformers (in them the frames of a video attend to each
other, and a sound to its padding), so they would not agree with the embeddings of an E worker.
"""

from __future__ import annotations

import dataclasses
import os
import tempfile
from pathlib import Path

from triptych import models
from triptych.checkpoint import open_model
from triptych.config import Config
from triptych.engines.adapter.base import checkpoint_sizes
from triptych.engines.base import (
    AllocateOnGpu,
    EngineReport,
    LoadedEngine,
    ReportProgress,
    with_encoder_stats,
)
from triptych.engines.checks import check_family
from triptych.engines.torch import load as built_in
from triptych.errors import InvalidConfig
from triptych.models.tensors import TORCH_DTYPES
from triptych.topology import Role

ENVIRONMENT = {
    "SGLANG_RETURN_ORIGINAL_LOGPROB": "1",  # before temperature is applied
    "SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN": "1",  # by options.SLACK
}

# Variables that the operator has set, without those that an engine in this process has set.
OPERATOR_VARIABLES = frozenset(os.environ)


def load(
    config: Config, role: Role, allocate: AllocateOnGpu, progress: ReportProgress
) -> LoadedEngine:
    if config.encoder == "native":
        raise InvalidConfig(
            "--encoder native: only SGLang's HTTP server gives access to its encoders, and "
            "Triptych does not run it. Use --encoder torch."
        )
    model = open_model(config.model, config.max_model_len)
    check_family("sglang", model)
    encoding = built_in.load(config, Role("E"), allocate, progress) if role.encodes else None
    if encoding is not None and not role.phases:
        return encoding
    threads = {"OMP_NUM_THREADS": str(config.cpu_threads)} if config.cpu_threads else {}
    for name, value in (ENVIRONMENT | threads).items():
        if name not in OPERATOR_VARIABLES:
            os.environ[name] = value
    from triptych.engines.sglang.engine import SGLangEngine
    from triptych.engines.sglang.options import server_args, sglang_environment
    from triptych.engines.sglang.processes import SGLangProcesses

    family = models.find_family(model)
    arguments = server_args(config, role, model)
    folder = tempfile.TemporaryDirectory(prefix="sglang-", dir=config.run_dir or None)
    variables = sglang_environment(
        config.worker_host, arguments, Path(folder.name), OPERATOR_VARIABLES
    )
    os.environ.update(variables)
    progress("starting SGLang", 0.0)
    processes = SGLangProcesses(arguments)
    bootstrap = (config.worker_host, arguments.disaggregation_bootstrap_port)
    engine = SGLangEngine(
        processes,
        family,
        model,
        TORCH_DTYPES[arguments.dtype],
        allocate,
        bootstrap if role.phases == "P" else None,
        split=role.phases != "PD",
    )
    parameters = checkpoint_sizes(family, model)  # SGLang loads the towers in every role

    def report() -> EngineReport:
        own = dataclasses.replace(engine.report(), parameters=parameters)
        return with_encoder_stats(own, None if encoding is None else encoding.report())

    def close() -> None:
        if encoding is not None:
            encoding.close()
        processes.close()
        folder.cleanup()

    encoder = None if encoding is None else encoding.encoder
    return LoadedEngine(encoder, engine, report, close, processes.died, device=arguments.device)
