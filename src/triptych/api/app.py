"""The HTTP application: checks access, finds the handler, and turns every error into a response.

``http`` reads and writes bytes; ``routes`` lists the routes; ``handlers`` does the work.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Coroutine
from typing import Any
from urllib.parse import unquote

import msgspec
from msgspec import Struct

from triptych.api.content import MediaSlices
from triptych.api.cors import cors_policy, is_preflight, preflight_headers
from triptych.api.handlers import Handlers
from triptych.api.keys import NOBODY, APIKeys, KeyHolder
from triptych.api.rate_limits import KeyQuota
from triptych.api.request_body import decode_request, name_ignored
from triptych.api.request_record import RequestRecord, record_of
from triptych.api.responses import ErrorResponse, encode
from triptych.api.routes import ROUTES, Access, Route, find_route, public_paths
from triptych.checkpoint import Model
from triptych.config import Config
from triptych.errors import (
    Draining,
    MethodNotAllowed,
    NotFound,
    OutOfMemory,
    RateLimitExceeded,
    TriptychError,
)
from triptych.http.exchange import JSON, HTTPExchange, error_headers, new_id
from triptych.http.parser import RequestHead
from triptych.http.server import HTTPServer
from triptych.http.tls import server_certificate
from triptych.observe.access_log import OWN_PROBE, AccessEntry, AccessLog, printable_path
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
CLIENT_LEFT = "client_left"  # in the access log, in place of an error's code
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
        self.keys = APIKeys(config.api_keys, config.admin_keys, config.keys_file)
        self._public = public_paths(config.public_routes)
        self._cors = cors_policy(config)
        self._access_log = AccessLog(config.log_format) if config.access_log else None
        self._max_json = config.limits.json_bytes
        self._max_media = max(config.limits.media_items, MAX_EXTRACTED)
        self._ignores_unknown = config.unknown_parameters == "ignore"

    def check_head(self, head: RequestHead) -> None:
        """Check access before the path: without a key, a client learns nothing else."""
        route = find_route(head.path)
        if self._cors is not None:
            head.response_headers = self._cors.headers(head)
            if route is not None and is_preflight(head):
                head.ignores_body = True
                self._record(head, NOBODY)
                return
        holder = self._identify(head, route)
        head.tenant = holder.tenant
        self._record(head, holder)
        if route is None:
            raise NotFound("There is no such path here; /openapi.json lists those that are.")
        head.ignores_body = head.method != "POST" or route.method != "POST"
        if holder.quota is not None:
            _admit(head, route, holder.quota)

    def _record(self, head: RequestHead, holder: KeyHolder) -> None:
        if holder.quota is not None or (self._access_log is not None and not _is_own_probe(head)):
            head.record = RequestRecord(holder.name, holder.quota)

    def _identify(self, head: RequestHead, route: Route | None) -> KeyHolder:
        """Whose request this is. Raises if it may not be sent."""
        access = Access.KEY if route is None else route.access
        if access is Access.OPEN:
            return NOBODY
        if self._public and route is not None and route.path in self._public:
            return self.keys.identify_public(head.headers)
        if access is Access.ADMIN:
            return self.keys.check_admin(head.headers)
        return self.keys.identify(head.headers)

    def reject(self, error: TriptychError, head: RequestHead | None, request_id: str) -> bytes:
        self.metrics.count_response("-", error.status)
        if self._access_log is not None and self._access_log.may_add_refused():
            self._access_log.add(_refused_entry(error, head, request_id))
        return _error_body(error, head, request_id)

    def handle(self, exchange: HTTPExchange) -> Coroutine[Any, Any, None]:
        """Answer a complete request, with an error if its handler fails."""
        route = find_route(exchange.head.path)
        assert route is not None, "check_head refuses other paths"
        if (record := record_of(exchange)) is None:
            return self._handle(route, exchange)
        return self._handle_recorded(route, exchange, record)

    async def _handle_recorded(
        self, route: Route, exchange: HTTPExchange, record: RequestRecord
    ) -> None:
        """Answer a request whose use is limited or logged."""
        exchange.id = new_id("req-")
        try:
            if record.quota is None or exchange.head.method != "POST":
                await self._handle(route, exchange)
            else:
                await self._handle_limited(route, exchange, record, record.quota)
        finally:
            if self._access_log is not None:
                self._access_log.add(record.entry(exchange))

    async def _handle_limited(
        self, route: Route, exchange: HTTPExchange, record: RequestRecord, quota: KeyQuota
    ) -> None:
        try:
            quota.start()
        except RateLimitExceeded as error:
            _send_error(exchange, error)
            self.metrics.count_response(route.path, exchange.status)
            return
        try:
            await self._handle(route, exchange)
        finally:
            quota.end()
            quota.count_tokens(record.tokens_used(left=record.error == CLIENT_LEFT))

    async def _handle(self, route: Route, exchange: HTTPExchange) -> None:
        head = exchange.head
        try:
            if head.method == route.method or (head.method == "HEAD" and route.method == "GET"):
                response = await self._call(route, exchange)
                if response is not None:
                    exchange.send(200, encode(response))
            else:
                self._send_allowed_methods(exchange, route)
        except asyncio.CancelledError:
            if not exchange.cut:
                self.metrics.cancelled += 1
                _record_error(exchange, CLIENT_LEFT)
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
        limits = exchange.size, self._max_json, self._max_media
        if not self._ignores_unknown:
            return decode_request(exchange.body, decoder, *limits)
        ignored: list[str] = []
        decoded = decode_request(exchange.body, decoder, *limits, ignored)
        if ignored:
            exchange.head.response_headers += name_ignored(ignored)
        return decoded

    def _send_allowed_methods(self, exchange: HTTPExchange, route: Route) -> None:
        methods = ", ".join([route.method, "OPTIONS", *(["HEAD"] if route.method == "GET" else [])])
        headers = f"allow: {methods}\r\n".encode()
        if self._cors is not None and is_preflight(exchange.head):
            headers += preflight_headers(methods)
        if exchange.head.method == "OPTIONS":
            exchange.send(200, b"", JSON, headers)
        else:
            error = MethodNotAllowed(f"This path takes {route.method} only.")
            _record_error(exchange, error.code)
            exchange.id = exchange.id or new_id("req-")
            body = _error_body(error, exchange.head, exchange.id)
            exchange.send(error.status, body, JSON, headers)

    async def close(self) -> None:
        """Write what the access log still holds."""
        if self._access_log is not None:
            await asyncio.to_thread(self._access_log.close)


def _admit(head: RequestHead, route: Route, quota: KeyQuota) -> None:
    """Count a request that does work, or refuse it. Either response says what is left."""
    try:
        if head.method == "POST":
            if route.request is bytes:
                quota.check_media()
            quota.admit()
    finally:
        head.response_headers += quota.headers()


def _is_own_probe(head: RequestHead) -> bool:
    """Whether ``serve`` asks if the server is ready, as it does many times during a start."""
    return head.path == "/health" and head.headers.get(b"user-agent") == OWN_PROBE


def _record_error(exchange: HTTPExchange, code: str) -> None:
    if (record := record_of(exchange)) is not None:
        record.error = code


def _refused_entry(error: TriptychError, head: RequestHead | None, request_id: str) -> AccessEntry:
    """The log line of a request that was refused before it was handled."""
    record = None if head is None else head.record
    return AccessEntry(
        time=time.time(),
        request_id=request_id,
        key=record.key if isinstance(record, RequestRecord) else "",
        method="-" if head is None else head.method,
        path="-" if head is None else printable_path(head.path),
        status=error.status,
        ms=0.0,
        error=error.code,
    )


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
    _record_error(exchange, error.code)
    body = _error_body(shown, exchange.head, exchange.id)
    if (stream := exchange.stream) is not None:
        event = stream.error_event
        stream.end(b"data: %b\n\n" % body if event is None else event(shown))
    if not exchange.started:
        exchange.send(shown.status, body, JSON, error_headers(shown))


async def start_server(config: Config, app: App) -> HTTPServer:
    """Listen on the host and port of the config (0: any free port)."""
    server = HTTPServer(config.limits, app, server_certificate(config))
    app.handlers.server = server
    await server.start(config.host, config.port)
    if app.keys.watch is not None:
        server.run_in_background(app.keys.watch.run())
    return server
