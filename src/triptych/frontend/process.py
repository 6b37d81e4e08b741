"""``triptych frontend``: the process around HTTP interface, processor and pipeline."""

from __future__ import annotations

import asyncio
import signal

import uvloop

from triptych.config import Config
from triptych.frontend.app import App, serve
from triptych.model import fingerprint, open_model
from triptych.observe import log
from triptych.pipeline.membership import Membership
from triptych.pipeline.run import Pipeline
from triptych.processor.prompt import Processor
from triptych.runtime import descriptors
from triptych.runtime.discovery import Directory


def main(config: Config, secret: str) -> int:
    log.configure()
    descriptors.take_all()
    return uvloop.run(_serve(config, secret))


async def _serve(config: Config, secret: str) -> int:
    """Answer until SIGTERM or Ctrl-C, then let running requests finish."""
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    model = open_model(config.model, config.max_model_len)
    processor = Processor(model, config)
    topology, directory = config.topology, Directory(config.run_dir)
    async with Membership(
        topology, directory, secret, config.routing, fingerprint(model)
    ) as membership:
        app = App(config, model, processor, Pipeline(topology, membership))
        frontend = await serve(config, app)
        await stop.wait()
        await frontend.drain(config.limits.drain_seconds)
    return 0
