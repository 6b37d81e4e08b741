"""The process of ``triptych frontend``: it connects the HTTP API, prompts, sources and pipeline."""

from __future__ import annotations

import asyncio
import gc
import os
from contextlib import AsyncExitStack

import uvloop

from triptych.api.app import App, start_server
from triptych.checkpoint import fingerprint, open_model
from triptych.config import Config
from triptych.host import join_host_port, listen_error
from triptych.http.server import HTTPServer
from triptych.observe import log
from triptych.observe.log import print_status
from triptych.pipeline.decoding import FrontendDecoding
from triptych.pipeline.kv.routing import KvRouting
from triptych.pipeline.membership import Membership
from triptych.pipeline.run import Pipeline
from triptych.prompt.processor import PromptProcessor
from triptych.runtime.concurrency import cancel_and_wait
from triptych.runtime.discovery import Discovery, open_discovery, report_waiting
from triptych.runtime.events import open_subscriber
from triptych.runtime.planes import open_planes
from triptych.runtime.process import (
    CLOSE_SECONDS,
    EXIT_NATS_LOST,
    exit_within,
    limit_allocator_cache,
    on_stop_signal,
    raise_descriptor_limit,
)
from triptych.sources.loader import MediaLoader
from triptych.sources.uploads import UploadStore
from triptych.transfer.client import TransferClient

GC_THRESHOLDS = (20_000, 20, 50)  # requests leave few cycles: collect seldom


def main(config: Config, secret: str) -> int:
    log.configure(config.log_format)
    raise_descriptor_limit()
    limit_allocator_cache()
    return uvloop.run(_serve(config, secret))


async def _serve(config: Config, secret: str) -> int:
    """Serve until SIGTERM, SIGHUP or Ctrl-C, then let running requests finish."""
    stop = asyncio.Event()
    model = open_model(config.model, config.max_model_len)
    processor = PromptProcessor(model, config)
    upload_bytes = config.limits.upload_bytes
    uploads = UploadStore(
        upload_bytes, config.limits.upload_seconds, share=config.share(upload_bytes)
    )
    topology = config.topology
    with on_stop_signal(stop.set):
        async with AsyncExitStack() as scope:
            name = f"frontend {os.getpid()}"
            discovery = await scope.enter_async_context(open_discovery(config, name, secret))
            planes = await scope.enter_async_context(open_planes(config, name))
            kv = KvRouting(config.kv, config.max_local_prefill) if config.routing == "kv" else None
            listener = None if kv is None else open_subscriber(config, planes, secret)
            if listener is not None:
                scope.push_async_callback(listener.close)
            membership = await scope.enter_async_context(
                Membership(
                    topology,
                    discovery,
                    secret,
                    config.routing,
                    fingerprint(model),
                    planes,
                    kv,
                    listener,
                )
            )
            sources = MediaLoader(config, uploads)
            scope.push_async_callback(sources.close)
            if config.enable_multimodal:
                sources.start()
            decoding = await _decoding(config, membership, scope)
            pipeline = Pipeline(topology, membership, decoding, kv, config.migration_limit)
            app = App(config, model, processor, pipeline, sources, uploads, decoding)
            scope.push_async_callback(app.close)
            frontend = await _listen(config, app)
            waiting = asyncio.create_task(_tell_missing(discovery, membership))
            scope.push_async_callback(cancel_and_wait, waiting)
            gc.collect()
            gc.freeze()  # what exists now stays: the collector can skip it
            gc.set_threshold(*GC_THRESHOLDS)
            lost = planes.lost if config.request_plane == "nats" else asyncio.Event()
            await _wait_for_any(stop, lost)
            code = EXIT_NATS_LOST if lost.is_set() and not stop.is_set() else 0
            await frontend.drain(config.limits.drain_seconds)
            exit_within(CLOSE_SECONDS, code)
    return code


async def _tell_missing(discovery: Discovery, membership: Membership) -> None:
    """Print which workers are missing, as long as some are."""

    def missing() -> str:
        roles = ", ".join(membership.missing())
        return roles and f"workers of {roles}"

    async def unused() -> str:
        count = len(membership.unused)
        return f"{count} found and not used: /cluster says why" if count else ""

    await report_waiting(discovery, missing, unused)


async def _wait_for_any(*events: asyncio.Event) -> None:
    waiting = [asyncio.ensure_future(event.wait()) for event in events]
    await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
    for one in waiting:
        one.cancel()


async def _decoding(
    config: Config, membership: Membership, scope: AsyncExitStack
) -> FrontendDecoding | None:
    """A decode pool beside the frontend, with --decode-at frontend."""
    if config.decode_at == "encoder":
        return None
    name = f"frontend-{os.getpid()}"
    transfers = TransferClient.from_config(config, name, 1)
    encodes = next(role for role in config.topology.roles if role.encodes)
    decoding = FrontendDecoding(config, membership, encodes, transfers)
    scope.push_async_callback(decoding.close)
    await transfers.check_transports()
    return decoding


async def _listen(config: Config, app: App) -> HTTPServer:
    try:
        server = await start_server(config, app)
    except (OSError, UnicodeError) as error:
        raise listen_error(error, config.host, config.port) from None
    scheme = "https" if config.tls_cert else "http"
    print_status(f"listening at {scheme}://{join_host_port(config.host, server.port)}")
    return server
