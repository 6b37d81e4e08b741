"""The HTTP application: checks access, finds the handler, and turns every error into a response.

``http`` reads and writes bytes; ``routes`` lists the routes; ``handlers`` does the work.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Any
from urllib.parse import unquote

import msgspec
from msgspec import Struct

from triptych.api.content import MediaSlices
from triptych.api.handlers import Handlers
from triptych.api.keys import APIKeys
from triptych.api.request_body import decode_request
from triptych.api.responses import ErrorResponse, encode
from triptych.api.routes import ROUTES, Access, Route, find_route
from triptych.checkpoint import Model
from triptych.config import Config
from triptych.errors import (
    Draining,
    MethodNotAllowed,
    NotFound,
    OutOfMemory,
    TriptychError,
)
from triptych.http.exchange import ERROR_HEADERS, JSON, HTTPExchange, new_id
from triptych.http.parser import RequestHead
from triptych.http.server import HTTPServer
from triptych.pipeline.decoding import FrontendDecoding
from triptych.pipeline.run import Pipeline
from triptych.prompt.processor import PromptProcessor
from triptych.sources.loader import MediaLoader
from triptych.sources.uploads import UploadStore

log = logging.getLogger(__name__)
PUBLIC_MESSAGES = {  # what clients read of server errors: nothing about the machine
    "broken_installation": (
        "The server cannot decode this kind of media: a library that is installed there is broken "
        "or does not fit. Ask its operator to run `triptych doctor`."
    ),
    "decoder_lost": (
        "The server cannot decode media at the moment. Try again later; if it stays so, ask its "
        "operator to run `triptych doctor`."
    ),
    "draining": "The server is stopping. Try again.",
    "engine_failed": "The engine failed on this request.",
    "nats_away": "NATS, through which workers are called, is away. Try again later.",
    "out_of_memory": "The server has no memory for this request at the moment. Try again.",
    "no_workers": "No worker is ready for this request. Try again later.",
    "prefix_gone": "A worker has dropped what it had cached. Try again.",
    "service_unavailable": (
        "A part of the server that this request needs is not available at the moment. Try again."
    ),
    "ticket_lost": "A worker took back its memory. Try again.",
    "worker_lost": "A worker was lost. Try again.",
}
DECODE_INLINE_BYTES = 1 << 20  # of a body; to decode more would block the event loop for too long
MAX_EXTRACTED = 1024  # media of a body that are extracted even if that is too many, to count them

_DECODERS: dict[str, msgspec.json.Decoder[Any]] = {
    route.path: msgspec.json.Decoder(route.request)
    for route in ROUTES
    if route.request not in (None, bytes)
}


class App:
    """What an HTTPServer serves: see ``http.connection.Application``."""

    def __init__(
        self,
        config: Config,
        model: Model,
        processor: PromptProcessor,
        pipeline: Pipeline,
        sources: MediaLoader,
        uploads: UploadStore,
        decoding: FrontendDecoding | None = None,
    ) -> None:
        self.handlers = Handlers(config, model, processor, pipeline, sources, uploads, decoding)
        self.metrics = self.handlers.metrics
        self._keys = APIKeys(config.api_keys, config.admin_keys)
        self._max_json = config.limits.json_bytes
        self._max_media = max(config.limits.media_items, MAX_EXTRACTED)

    def check_head(self, head: RequestHead) -> None:
        """Check access before the path: without a key, a client learns nothing else."""
        route = find_route(head.path)
        access = Access.KEY if route is None else route.access
        authorization = head.headers.get(b"authorization", b"")
        if access is Access.ADMIN:
            self._keys.check_admin(authorization)
        elif access is Access.KEY:
            head.tenant = self._keys.tenant(authorization)
        if route is None:
            raise NotFound("There is no such path here; /openapi.json lists those that are.")
        head.ignores_body = head.method != "POST" or route.method != "POST"

    def reject(self, error: TriptychError, head: RequestHead | None, request_id: str) -> bytes:
        self.metrics.count_response("-", error.status)
        return _error_body(error, head, request_id)

    async def handle(self, exchange: HTTPExchange) -> None:
        """Answer a complete request, with an error if its handler fails."""
        head = exchange.head
        route = find_route(head.path)
        assert route is not None, "check_head refuses other paths"
        try:
            if head.method == route.method or (head.method == "HEAD" and route.method == "GET"):
                response = await self._call(route, exchange)
                if response is not None:
                    exchange.send(200, encode(response))
            else:
                _send_allowed_methods(exchange, route.method)
        except asyncio.CancelledError:
            if not exchange.cut:
                self.metrics.cancelled += 1
                raise
            _send_error(exchange, Draining("the time to finish was over"))
        except Exception as error:  # noqa: BLE001 (handlers may raise anything)
            _send_error(exchange, error)
        finally:
            self.metrics.count_response(route.path, exchange.status)

    async def _call(self, route: Route, exchange: HTTPExchange) -> Struct | None:
        """Call the handler with what its route declares."""
        if decoder := _DECODERS.get(route.path):
            if exchange.size <= DECODE_INLINE_BYTES:
                request, media = self._decode(decoder, exchange)
            else:
                request, media = await asyncio.to_thread(self._decode, decoder, exchange)
            return await route.handler(self.handlers, exchange, request, media)
        if route.parameter:
            parameter = unquote(exchange.head.path.removeprefix(route.prefix))
            return await route.handler(self.handlers, exchange, parameter)
        return await route.handler(self.handlers, exchange)

    def _decode(
        self, decoder: msgspec.json.Decoder[Any], exchange: HTTPExchange
    ) -> tuple[Any, MediaSlices]:
        """Decode the body. Keeps no reference to it, so that the handler can free it."""
        return decode_request(
            exchange.body, decoder, exchange.size, self._max_json, self._max_media
        )


def _send_allowed_methods(exchange: HTTPExchange, method: str) -> None:
    methods = [method, "OPTIONS", *(("HEAD",) if method == "GET" else ())]
    allow = f"allow: {', '.join(methods)}\r\n".encode()
    if exchange.head.method == "OPTIONS":
        exchange.send(200, b"", JSON, allow)
    else:
        error = MethodNotAllowed(f"This path takes {method} only.")
        exchange.id = exchange.id or new_id("req-")
        body = _error_body(error, exchange.head, exchange.id)
        exchange.send(error.status, body, JSON, allow)


def _error_body(error: TriptychError, head: RequestHead | None, request_id: str) -> bytes:
    """The error as the route describes it."""
    route = None if head is None else find_route(head.path)
    shape = ErrorResponse if route is None else route.error
    return encode(shape.of(error, request_id))


def _send_error(exchange: HTTPExchange, error: Exception) -> None:
    """Tell the client; the details of server errors go to the log only."""
    exchange.id = exchange.id or new_id("req-")
    path, extra = exchange.head.path, {"request_id": exchange.id}
    if isinstance(error, MemoryError):
        error = OutOfMemory("no memory left")
    if not isinstance(error, TriptychError):
        log.error("request to %s failed", path, exc_info=error, extra=extra)
        error = TriptychError("")
    elif error.status >= 500:
        log.warning("request to %s failed: %s (%s)", path, error.message, error.code, extra=extra)
    shown = error
    if error.status >= 500:
        shown = TriptychError(PUBLIC_MESSAGES.get(error.code, "Something went wrong on our side."))
        shown.status, shown.code = error.status, error.code
    body = _error_body(shown, exchange.head, exchange.id)
    if (stream := exchange.stream) is not None:
        event = stream.error_event
        stream.end(b"data: %b\n\n" % body if event is None else event(shown))
    if not exchange.started:
        exchange.send(shown.status, body, JSON, ERROR_HEADERS.get(shown.status, b""))


async def start_server(config: Config, app: App) -> HTTPServer:
    """Listen on the host and port of the config (0: any free port)."""
    server = HTTPServer(config.limits, app)
    app.handlers.server = server
    await server.start(config.host, config.port)
    return server
