"""Starts SGLang for a role. This is the door that ``engines.base.find("sglang")`` opens.

Media are encoded by the built-in encoder in every pattern, so that all give the same tokens:
SGLang's own towers see other things than those of transformers (the moments of a clip each other, a
sound its padding), and an embedding from an E worker could not agree with them.
"""

from __future__ import annotations

import dataclasses
import os
import tempfile
from pathlib import Path

from triptych import models
from triptych.checkpoint import open_model
from triptych.config import Config
from triptych.engines.adapter.stored import checkpoint_sizes
from triptych.engines.base import (
    AllocateOnGpu,
    EngineReport,
    LoadedEngine,
    ReportProgress,
    with_encoder_stats,
)
from triptych.engines.checks import check_family
from triptych.engines.sglang import listening
from triptych.engines.torch import load as built_in
from triptych.errors import InvalidConfig
from triptych.models.tensors import TORCH_DTYPES
from triptych.topology import Role

ENVIRONMENT = {
    "SGLANG_RETURN_ORIGINAL_LOGPROB": "1",  # as the model gave them, before any temperature
    "SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN": "1",  # by options.SLACK
}

# By the operator: what one engine was told is not for the next one in this process.
GIVEN = frozenset(os.environ)


def load(
    config: Config, role: Role, empty: AllocateOnGpu, progress: ReportProgress
) -> LoadedEngine:
    if config.encoder == "native":
        raise InvalidConfig(
            "--encoder native: SGLang's own encoders are reached by its HTTP server only, which "
            "Triptych does not run. Say --encoder torch."
        )
    model = open_model(config.model, config.max_model_len)
    check_family("sglang", model)
    encoding = built_in.load(config, Role("E"), empty, progress) if role.encodes else None
    if encoding is not None and not role.span:
        return encoding
    threads = {"OMP_NUM_THREADS": str(config.torch.threads)} if config.torch.threads else {}
    for name, value in (ENVIRONMENT | threads).items():
        if name not in GIVEN:
            os.environ[name] = value
    from triptych.engines.sglang.engine import SGLangEngine
    from triptych.engines.sglang.options import server_args
    from triptych.engines.sglang.running import SGLangProcesses

    family = models.find_family(model)
    arguments = server_args(config, role, model)
    folder = tempfile.TemporaryDirectory(prefix="sglang-", dir=config.run_dir or None)
    home = Path(folder.name)
    os.environ.update(listening.sglang_environment(config.worker_host, arguments, home, GIVEN))
    progress("starting SGLang", 0.0)
    running = SGLangProcesses(arguments)
    place = (config.worker_host, arguments.disaggregation_bootstrap_port)
    engine = SGLangEngine(
        running,
        family,
        model,
        TORCH_DTYPES[arguments.dtype],
        empty,
        place if role.span == "P" else None,
        apart=role.span != "PD",
    )
    parameters = checkpoint_sizes(family, model)  # SGLang loads the towers whatever its role

    def report() -> EngineReport:
        own = dataclasses.replace(engine.report(), parameters=parameters)
        return with_encoder_stats(own, None if encoding is None else encoding.report())

    def close() -> None:
        if encoding is not None:
            encoding.close()
        running.close()
        folder.cleanup()

    encoder = None if encoding is None else encoding.encoder
    return LoadedEngine(encoder, engine, report, close, running.died, device=arguments.device)
