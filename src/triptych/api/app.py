"""The HTTP interface: routes, keys and errors.

Connections and bytes are the server's (``http``); what requests look like is in ``openai``, what
answers look like in ``shape``, and how a completion comes about in ``completion``.
"""

from __future__ import annotations

import asyncio
import logging
import os
import re
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar
from urllib.parse import unquote

import msgspec
from msgspec import Struct

from triptych.api import requests
from triptych.api.body import MediaSlices
from triptych.api.completion import CompletionRunner, Pipeline
from triptych.api.content import MEDIA_DISABLED, MediaPolicy
from triptych.api.decode import decode_request
from triptych.api.keys import APIKeys
from triptych.api.openapi import openapi_document
from triptych.api.requests import ChatMessage, ChatRequest, CompletionRequest
from triptych.api.responses import ChatFormat, TextFormat, encode
from triptych.checkpoint import Model
from triptych.config import Config
from triptych.errors import (
    ContextLengthExceeded,
    Draining,
    InvalidMedia,
    InvalidValue,
    MediaDisabled,
    MethodNotAllowed,
    ModelNotFound,
    NotFound,
    OutOfMemory,
    Overloaded,
    RequestError,
    TriptychError,
)
from triptych.http.exchange import JSON, HTTPExchange, error_body, error_response, new_id
from triptych.http.head import RequestHead
from triptych.http.server import HTTPServer
from triptych.observe import metrics
from triptych.observe.log import warning_totals
from triptych.pipeline.decoding import FrontendDecoding
from triptych.prompt.processor import ChatTurn, Prompt, PromptProcessor
from triptych.runtime.discovery import GENERATE, Endpoint
from triptych.sources.items import Sources
from triptych.sources.uploads import UPLOAD_SCHEME, UploadStore

log = logging.getLogger(__name__)
OPEN = frozenset(("/health", "/live"))  # routes that need no key
ADMIN = frozenset(("/cluster", "/metrics"))  # routes that tell of all tenants and of the machine
MODEL = "/v1/models/{model}"
UPLOAD = "/v1/media/{id}"
_NAMED = {MODEL: re.compile(r"/v1/models/(.+)"), UPLOAD: re.compile(r"/v1/media/(.+)")}
TEXT = {  # what is told of faults on our side: never where anything is
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

READ_INLOOP = 1 << 20  # bytes of a body, and
DECODED_INLOOP = 2 << 20  # of base64; more would hold up everyone else
STROKE = 256 << 10  # bytes that are copied while nobody else can run
COUNTED = 1024  # media that are taken out of a body even so: who sends too many is told how many

Route = Callable[[HTTPExchange], Awaitable[None]]
T = TypeVar("T", bound=Struct)


class App:
    def __init__(
        self,
        config: Config,
        model: Model,
        processor: PromptProcessor,
        pipeline: Pipeline,
        sources: Sources,
        uploads: UploadStore,
        decoding: FrontendDecoding | None = None,
    ) -> None:
        self.metrics = metrics.Metrics()
        self.name = config.served_model_name or model.name
        self._config = config
        self._limits = config.limits
        self._model = model
        self._processor = processor
        self._pipeline = pipeline
        self._created = int(time.time())
        self._keys = APIKeys(config.api_keys, config.admin_keys)
        self._uploads = uploads
        self._allowed = MediaPolicy(
            config.enable_multimodal, config.limits.media_items, config.media_limits
        )
        self._chat_shape = ChatFormat(processor.tokenizer.token_bytes)
        self._plain_shape = TextFormat(processor.tokenizer.token_bytes)
        self._completions = CompletionRunner(
            self.name, model, processor.tokenizer, sources, pipeline, self.metrics
        )
        self._sources = sources
        self._decoding = decoding
        self._server: HTTPServer | None = None
        self._routes: dict[str, tuple[str, Route]] = {
            "/v1/chat/completions": ("POST", self._chat),
            "/v1/completions": ("POST", self._completion),
            "/v1/models": ("GET", self._models),
            MODEL: ("GET", self._one_model),
            "/v1/media": ("POST", self._upload),
            UPLOAD: ("DELETE", self._drop_upload),
            "/tokenize": ("POST", self._tokenize),
            "/detokenize": ("POST", self._detokenize),
            "/health": ("GET", self._health),
            "/live": ("GET", self._live),
            "/metrics": ("GET", self._metrics),
            "/openapi.json": ("GET", self._openapi),
            "/cluster": ("GET", self._cluster),
        }

    @property
    def draining(self) -> bool:
        return self._server is not None and self._server.draining

    # --- what the server calls

    def attach(self, server: HTTPServer) -> None:
        self._server = server

    def admit(self, head: RequestHead) -> None:
        """Refuse a head before its body is read: without the key, nothing else is told."""
        authorization = head.headers.get(b"authorization", b"")
        if head.path in ADMIN:
            self._keys.check_admin(authorization)
        elif head.path not in OPEN:
            head.tenant = self._keys.tenant(authorization)
        name = head.path if head.path in self._routes else _name(head.path)
        if name is None:
            raise NotFound("There is no such path here; /openapi.json lists those that are.")
        head.bodiless = head.method != "POST" or self._routes[name][0] != "POST"

    def refused(self, error: TriptychError) -> None:
        self.metrics.answered("-", error.status)

    async def answer(self, exchange: HTTPExchange) -> None:
        """The edge: every request that came in whole ends here, in an answer."""
        head = exchange.head
        name = head.path if head.path in self._routes else _name(head.path) or MODEL
        method, route = self._routes[name]
        try:
            if head.method == method or (head.method == "HEAD" and method == "GET"):
                await route(exchange)
            else:
                _other_method(exchange, method)
        except asyncio.CancelledError:
            if not exchange.cut:
                self.metrics.cancelled += 1
                raise
            _fail(exchange, Draining("the time to finish was over"))
        except TriptychError as error:
            _fail(exchange, error)
        except Exception as error:  # noqa: BLE001 (one of the two edges)
            _fail(exchange, error)
        finally:
            self.metrics.answered(name, exchange.status)

    # --- completions

    async def _chat(self, exchange: HTTPExchange) -> None:
        begun = time.monotonic()
        request, slices = await self._read(exchange, requests.CHAT)
        self._check(request)
        turns = await self._turns(request.messages, slices)
        slices.clear()
        exchange.release()  # what it held lives on in the turns
        prompt: Prompt | None = None
        try:
            with self._admitted():
                prompt = await self._processor.chat(turns)
                await self._completions.complete(
                    exchange, request, self._chat_shape, [prompt], begun
                )
        except ContextLengthExceeded as error:
            error.param = "messages"
            raise
        except RequestError as error:
            if prompt is not None:
                error.param = prompt.place(error.param)
            raise

    async def _completion(self, exchange: HTTPExchange) -> None:
        begun = time.monotonic()
        request, _ = await self._read(exchange, requests.COMPLETION)
        self._check(request)
        given = requests.to_prompts(request)
        for prompt in given:
            if not isinstance(prompt, str):
                requests.check_token_ids(prompt, self._model.vocabulary, "prompt")
        try:
            with self._admitted():
                prompts = [await self._processor.text(prompt) for prompt in given]
                await self._completions.complete(
                    exchange, request, self._plain_shape, prompts, begun
                )
        except ContextLengthExceeded as error:
            error.param = "prompt"
            raise

    async def _read(
        self, exchange: HTTPExchange, decoder: msgspec.json.Decoder[T]
    ) -> tuple[T, MediaSlices]:
        """A body as a request; to look through much of it takes its time, elsewhere."""
        most = self._limits.json_bytes
        items = max(self._limits.media_items, COUNTED)
        if exchange.size <= READ_INLOOP:
            return decode_request(exchange.body, decoder, exchange.size, most, items)
        return await asyncio.to_thread(
            decode_request, exchange.body, decoder, exchange.size, most, items
        )

    async def _turns(
        self, messages: Sequence[ChatMessage], slices: MediaSlices
    ) -> Sequence[ChatTurn]:
        """Messages with their media as bytes; to make many of these takes its time, elsewhere."""
        if sum(map(len, slices)) <= DECODED_INLOOP:
            return requests.to_turns(messages, slices, self._allowed)
        return await asyncio.to_thread(requests.to_turns, messages, slices, self._allowed)

    def _check(self, request: ChatRequest | CompletionRequest) -> None:
        self._known(request.model)
        requests.check_request(request, self._limits)

    def _known(self, model: str | None) -> None:
        if model is not None and model != self.name:
            raise ModelNotFound("There is no such model here; /v1/models lists it.", param="model")

    def _admitted(self) -> _InFlight:
        if self.draining:
            raise Draining(TEXT["draining"])
        if self.metrics.in_flight >= self._limits.requests:
            raise Overloaded(
                f"{self._limits.requests} requests are being served already. Try again."
            )
        return _InFlight(self.metrics)

    # --- the smaller routes

    async def _models(self, exchange: HTTPExchange) -> None:
        exchange.send(200, encode({"object": "list", "data": [self._about_model()]}))

    async def _one_model(self, exchange: HTTPExchange) -> None:
        self._known(_given(MODEL, exchange.head.path))
        exchange.send(200, encode(self._about_model()))

    def _about_model(self) -> dict[str, str | int | list[str]]:
        return {
            "id": self.name,
            "object": "model",
            "created": self._created,
            "owned_by": "triptych",
            "max_model_len": self._model.context,
            "modalities": ["text", *(self._model.media_ids if self._allowed.enabled else ())],
        }

    async def _upload(self, exchange: HTTPExchange) -> None:
        """Keep a body, whatever it is, for later requests of the same key."""
        if not self._allowed.enabled:
            raise MediaDisabled(MEDIA_DISABLED)
        if not exchange.size:
            raise InvalidMedia("The body is empty: send the media file itself.")
        if exchange.head.headers.get(b"content-type", b"").lower().startswith(b"multipart/"):
            raise InvalidMedia(
                "The body is a form: send the media file itself, as `curl --data-binary @FILE` "
                "does."
            )
        if self.draining:
            raise Draining(TEXT["draining"])  # nobody could use it any more
        body = memoryview(exchange.body)[: exchange.size]
        data = await asyncio.to_thread(_copy, body) if len(body) > READ_INLOOP else bytes(body)
        upload = self._uploads.put(exchange.head.tenant, data)
        answer = {
            "id": upload.id,
            "object": "media",
            "bytes": upload.size,
            "created_at": int(time.time()),
            "expires_at": int(upload.expires),
        }
        exchange.send(200, encode(answer))

    async def _drop_upload(self, exchange: HTTPExchange) -> None:
        id = UPLOAD_SCHEME + _given(UPLOAD, exchange.head.path).removeprefix(UPLOAD_SCHEME)
        self._uploads.drop(exchange.head.tenant, id)
        exchange.send(200, encode({"id": id, "object": "media", "deleted": True}))

    async def _tokenize(self, exchange: HTTPExchange) -> None:
        request, slices = await self._read(exchange, requests.TOKENIZE)
        self._known(request.model)
        ids: Sequence[int]
        if request.messages is not None and request.prompt is None:
            turns = await self._turns(request.messages, slices)
            ids = (await self._processor.chat(turns)).ids
        elif request.prompt is not None and request.messages is None:
            special = request.add_special_tokens is not False
            try:
                ids = await self._processor.tokenizer.encode(
                    request.prompt, special, self._model.context
                )
            except ContextLengthExceeded as error:
                error.param = "prompt"
                raise
        else:
            raise InvalidValue("Give either 'prompt' or 'messages'.", param="prompt")
        answer = {"count": len(ids), "max_model_len": self._model.context, "tokens": ids}
        exchange.send(200, encode(answer))

    async def _detokenize(self, exchange: HTTPExchange) -> None:
        request, _ = await self._read(exchange, requests.DETOKENIZE)
        self._known(request.model)
        requests.check_token_ids(request.tokens, self._model.vocabulary, "tokens")
        text = await self._processor.tokenizer.decode(request.tokens, False)
        exchange.send(200, encode({"prompt": text}))

    async def _health(self, exchange: HTTPExchange) -> None:
        missing = self._pipeline.missing()
        if self.draining:
            exchange.send(503, encode({"status": "draining"}))
        elif missing:
            exchange.send(503, encode({"status": "unready", "missing": missing}))
        else:
            exchange.send(200, b'{"status":"ok"}')

    async def _live(self, exchange: HTTPExchange) -> None:
        exchange.send(200, b'{"status":"ok"}')

    async def _metrics(self, exchange: HTTPExchange) -> None:
        self.metrics.loop_lag = None if self._server is None else self._server.lag
        self.metrics.media = self._media_counters()
        self.metrics.routing = self._pipeline.routing
        self.metrics.connections = warning_totals()
        text = self.metrics.text(await self._pipeline.cluster())
        exchange.send(200, text, metrics.CONTENT_TYPE)

    def _media_counters(self) -> dict[str, float]:
        decoded = {} if self._decoding is None else self._decoding.counters
        held = {} if self._server is None else self._server.intake.counters
        uploaded = {"uploaded_bytes": self._uploads.held}
        return {**self._sources.counters, **decoded, **held, **uploaded}

    async def _openapi(self, exchange: HTTPExchange) -> None:
        exchange.send(200, openapi_document(self._keys.demanded, self._limits.choices))

    async def _cluster(self, exchange: HTTPExchange) -> None:
        workers = [
            msgspec.structs.asdict(report)
            | {"parameters": msgspec.structs.asdict(report.parameters)}
            | {"endpoint": str(Endpoint(self._config.namespace, report.id, GENERATE))}
            for report in await self._pipeline.cluster()
        ]
        standing = msgspec.structs.asdict(self._pipeline.standing)
        answer = {
            "topology": str(self._config.topology),
            "discovery": standing | {"namespace": self._config.namespace},  # as endpoints say
            "frontend": {
                "pid": os.getpid(),
                "state": "draining" if self.draining else "ready",
                "in_flight": self.metrics.in_flight,
                "tensor_bytes": self._pipeline.tensor_bytes,
                "tickets": 0 if self._decoding is None else self._decoding.tickets,
                "media": self._media_counters(),
                "routing": {"by": self._config.routing, **self._pipeline.routing},
            },
            "workers": workers,
            "unused": [msgspec.structs.asdict(one) for one in self._pipeline.unused],
        }
        exchange.send(200, encode(answer))


class _InFlight:
    """A scope that counts a request."""

    __slots__ = ("_metrics",)

    def __init__(self, metrics: metrics.Metrics) -> None:
        self._metrics = metrics

    def __enter__(self) -> None:
        self._metrics.in_flight += 1

    def __exit__(self, *_: object) -> None:
        self._metrics.in_flight -= 1


def _name(path: str) -> str | None:
    """The route that a path with a name in it belongs to."""
    return next((name for name, pattern in _NAMED.items() if pattern.fullmatch(path)), None)


def _given(route: str, path: str) -> str:
    """The name in a path."""
    match = _NAMED[route].fullmatch(path)
    return unquote(match[1]) if match else ""


def _copy(body: memoryview) -> bytes:
    """In strokes, and without the interpreter where they are joined: one copy would hold it."""
    return b"".join([bytes(body[at : at + STROKE]) for at in range(0, len(body), STROKE)])


def _other_method(exchange: HTTPExchange, method: str) -> None:
    allow = b"allow: %b\r\n" % b", ".join(
        (method.encode(), b"OPTIONS", *((b"HEAD",) if method == "GET" else ()))
    )
    if exchange.head.method == "OPTIONS":
        exchange.send(200, b"", JSON, allow)
        return
    error = MethodNotAllowed(f"This path takes {method} only.")
    exchange.send(error.status, error_body(error), JSON, allow)


def _fail(exchange: HTTPExchange, error: Exception) -> None:
    """Tell the client; what is our fault is told in full to the log alone."""
    path = exchange.head.path
    id = exchange.id = exchange.id or new_id("req-")
    if isinstance(error, MemoryError):
        error = OutOfMemory("no memory left")
    if not isinstance(error, TriptychError):
        log.error("request %s to %s failed", id, path, exc_info=error)
        error = TriptychError("")
    elif error.status >= 500:
        log.warning("request %s to %s failed: %s (%s)", id, path, error.message, error.code)
    told = error
    if told.status >= 500:
        told = TriptychError(TEXT.get(error.code, "Something went wrong on our side."))
        told.status, told.code = error.status, error.code
    if exchange.stream is not None:
        exchange.stream.end(b"data: " + error_body(told) + b"\n\n")
    if exchange.started:
        return
    status, body, extra = error_response(told)
    exchange.send(status, body, JSON, extra)


async def serve(config: Config, app: App) -> HTTPServer:
    """Listen on the config's host and port (0: any free one)."""
    server = HTTPServer(config.limits, app.answer, app.admit, app.refused)
    app.attach(server)
    await server.start(config.host, config.port)
    return server
