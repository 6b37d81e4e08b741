"""The engine without a model, for tests and benchmarks.

Tokens are a hash of prompt, media keys, seed and position, so that every pattern gives the same
ones. It steps, pages and hands over like a real engine, and verifies byte for byte what another
worker encoded or prefilled. What it has seen it finds again, as a prefix cache does. It knows no
torch, no picture formats and no meaning.
"""

from __future__ import annotations

from triptych.checkpoint import open_model, packaged_folder
from triptych.config import Config
from triptych.engines.base import (
    Allocate,
    EngineReport,
    LoadedEngine,
    ReportProgress,
    with_encoder_stats,
)
from triptych.engines.fake.encoder import FakeEncoder
from triptych.engines.fake.engine import FakeEngine
from triptych.topology import Role


def load(config: Config, role: Role, empty: Allocate, progress: ReportProgress) -> LoadedEngine:
    model = open_model(config.model or packaged_folder("qwen"), config.max_model_len)
    encoder = FakeEncoder(model, config.fake, empty) if role.encodes else None
    engine = FakeEngine(model, config.fake, empty) if role.span else None
    progress("fake engine", 1.0)

    def report() -> EngineReport:
        return with_encoder_stats(engine.report() if engine else EngineReport(), encoder)

    def close() -> None:
        if encoder:
            encoder.close()
        if engine:
            engine.close()

    cache = engine.cache if engine else None
    return LoadedEngine(encoder, engine, report, close, cache=cache, resumes=engine is not None)
