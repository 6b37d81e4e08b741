"""The table of routes, and the OpenAPI document that describes it.

``ROUTES`` says of each route who may call it, what it takes, what it answers and which handler
runs. Dispatch, 404, 405 and ``/openapi.json`` follow from the table.
"""

from __future__ import annotations

import difflib
import functools
from collections.abc import Awaitable, Callable
from enum import Enum
from types import UnionType
from typing import Any, Literal

import msgspec
from msgspec import Struct

from triptych import __version__
from triptych.api.anthropic_requests import CountTokensRequest, MessagesRequest
from triptych.api.anthropic_responses import (
    CountTokensResponse,
    MessageEvent,
    MessagesError,
    MessagesResponse,
)
from triptych.api.handlers import Handlers
from triptych.api.requests import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    GenerateRequest,
    GenerateSampling,
    TokenizeRequest,
    Unsupported,
)
from triptych.api.response_objects import ResponseObject, ResponseStreamEvent
from triptych.api.response_requests import ResponseRequest
from triptych.api.responses import (
    ChatCompletion,
    ChatCompletionChunk,
    ClusterResponse,
    DetokenizeResponse,
    ErrorResponse,
    GenerateChunk,
    GenerateResponse,
    HealthResponse,
    MediaDeleted,
    MediaUpload,
    ModelCard,
    ModelList,
    OpenAPIDocument,
    TextCompletion,
    TextCompletionChunk,
    TokenizeResponse,
    Transcription,
    UnhealthyResponse,
    VersionResponse,
)
from triptych.errors import InvalidConfig
from triptych.http.exchange import HTTPExchange


class Access(Enum):
    """Who may call a route."""

    OPEN = "anyone"
    KEY = "holders of an API key, if the server has API keys"
    ADMIN = "holders of the admin key, if the server has any keys"


class Route(Struct, frozen=True, kw_only=True):
    """One path with its method. GET answers HEAD too."""

    path: str  # may end in a parameter, as in /v1/models/{model}
    method: Literal["GET", "POST", "DELETE"]
    access: Access  # no default, so that nobody forgets it
    request: type[Struct] | type[bytes] | None = None  # bytes: the body as it is
    response: type[Struct] | type[str]  # str: plain text
    events: type[Struct] | UnionType | None = None  # of a streamed response
    error: type[ErrorResponse] | type[MessagesError] = ErrorResponse
    failures: dict[int, type[Struct]] = {}  # responses that are not an ``error``, by status
    handler: Callable[..., Awaitable[Struct | None]]
    summary: str

    @property
    def prefix(self) -> str:
        """What stands before the parameter; the whole path if there is none."""
        return self.path.partition("{")[0]

    @property
    def parameter(self) -> str:
        """The name of the parameter; empty if there is none."""
        return self.path.partition("{")[2].removesuffix("}")


async def openapi(handlers: Handlers, exchange: HTTPExchange) -> OpenAPIDocument:
    config = handlers.config
    public = public_paths(config.public_routes)
    return openapi_document(config.needs_key, config.limits.choices, public)


ROUTES = (
    Route(
        path="/v1/chat/completions",
        method="POST",
        access=Access.KEY,
        request=ChatRequest,
        response=ChatCompletion,
        events=ChatCompletionChunk,
        handler=Handlers.chat,
        summary="Answer a chat; with stream=true as server-sent events.",
    ),
    Route(
        path="/v1/completions",
        method="POST",
        access=Access.KEY,
        request=CompletionRequest,
        response=TextCompletion,
        events=TextCompletionChunk,
        handler=Handlers.completion,
        summary="Continue a prompt, or each of several.",
    ),
    Route(
        path="/v1/messages",
        method="POST",
        access=Access.KEY,
        request=MessagesRequest,
        response=MessagesResponse,
        events=MessageEvent,
        error=MessagesError,
        handler=Handlers.messages,
        summary="Answer a chat in the shape of Anthropic's API.",
    ),
    Route(
        path="/v1/messages/count_tokens",
        method="POST",
        access=Access.KEY,
        request=CountTokensRequest,
        response=CountTokensResponse,
        error=MessagesError,
        handler=Handlers.count_tokens,
        summary="Tokens of the prompt of such a chat.",
    ),
    Route(
        path="/v1/responses",
        method="POST",
        access=Access.KEY,
        request=ResponseRequest,
        response=ResponseObject,
        events=ResponseStreamEvent,
        handler=Handlers.create_response,
        summary="Answer a chat in the shape of OpenAI's Responses API.",
    ),
    Route(
        path="/v1/responses/{id}",
        method="GET",
        access=Access.KEY,
        response=ResponseObject,
        handler=Handlers.get_response,
        summary="An answer that was stored for the same key.",
    ),
    Route(
        path="/inference/v1/generate",
        method="POST",
        access=Access.KEY,
        request=GenerateRequest,
        response=GenerateResponse,
        events=GenerateChunk,
        handler=Handlers.generate,
        summary="Continue a prompt of token ids; the answer has token ids too.",
    ),
    Route(
        path="/v1/models",
        method="GET",
        access=Access.KEY,
        response=ModelList,
        handler=Handlers.list_models,
        summary="The model that is served.",
    ),
    Route(
        path="/v1/models/{model}",
        method="GET",
        access=Access.KEY,
        response=ModelCard,
        handler=Handlers.get_model,
        summary="The same, by its name.",
    ),
    Route(
        path="/v1/audio/transcriptions",
        method="POST",
        access=Access.KEY,
        request=bytes,
        response=Transcription,
        handler=Handlers.transcribe,
        summary="The words of a sound file, which a form (multipart/form-data) has.",
    ),
    Route(
        path="/v1/media",
        method="POST",
        access=Access.KEY,
        request=bytes,
        response=MediaUpload,
        handler=Handlers.upload,
        summary="Store a media file, sent as it is or in a form, for later requests of its key.",
    ),
    Route(
        path="/v1/media/{id}",
        method="DELETE",
        access=Access.KEY,
        response=MediaDeleted,
        handler=Handlers.delete_upload,
        summary="Delete an upload, by its id, with or without media://.",
    ),
    Route(
        path="/tokenize",
        method="POST",
        access=Access.KEY,
        request=TokenizeRequest,
        response=TokenizeResponse,
        handler=Handlers.tokenize,
        summary="Token ids of a prompt or of a chat.",
    ),
    Route(
        path="/detokenize",
        method="POST",
        access=Access.KEY,
        request=DetokenizeRequest,
        response=DetokenizeResponse,
        handler=Handlers.detokenize,
        summary="Text of token ids.",
    ),
    Route(
        path="/health",
        method="GET",
        access=Access.OPEN,
        response=HealthResponse,
        failures={503: UnhealthyResponse},
        handler=Handlers.health,
        summary="200 while every role has a ready worker, else 503 with those missing.",
    ),
    Route(
        path="/ping",
        method="GET",
        access=Access.OPEN,
        response=str,
        handler=Handlers.ping,
        summary="As /health, by the status alone: the body is empty.",
    ),
    Route(
        path="/version",
        method="GET",
        access=Access.KEY,
        response=VersionResponse,
        handler=Handlers.version,
        summary="The version of the server.",
    ),
    Route(
        path="/live",
        method="GET",
        access=Access.OPEN,
        response=HealthResponse,
        handler=Handlers.live,
        summary="200 while the process answers.",
    ),
    Route(
        path="/metrics",
        method="GET",
        access=Access.ADMIN,
        response=str,
        handler=Handlers.prometheus,
        summary="Prometheus text.",
    ),
    Route(
        path="/openapi.json",
        method="GET",
        access=Access.KEY,
        response=OpenAPIDocument,
        handler=openapi,
        summary="This document.",
    ),
    Route(
        path="/cluster",
        method="GET",
        access=Access.ADMIN,
        response=ClusterResponse,
        handler=Handlers.cluster,
        summary="Reports of all workers, and why others that were found are not used.",
    ),
)

_EXACT = {route.path: route for route in ROUTES if not route.parameter}
_WITH_PARAMETER = tuple(route for route in ROUTES if route.parameter)


def find_route(path: str) -> Route | None:
    route = _EXACT.get(path)
    if route is None:
        for other in _WITH_PARAMETER:
            if path.startswith(other.prefix) and len(path) > len(other.prefix):
                return other
    return route


def public_paths(given: str) -> frozenset[str]:
    """The paths of ``--public-routes``, as the table writes them."""
    paths = frozenset(path for part in given.split(",") if (path := part.strip()))
    for path in sorted(paths):
        if all(route.path != path for route in ROUTES):
            near = difflib.get_close_matches(path, [route.path for route in ROUTES], 1)
            hint = f"Did you mean {near[0]}?" if near else "docs/interface.md lists the paths."
            raise InvalidConfig(f"--public-routes '{path}' is not a path of this server. {hint}")
    return paths


# --- OpenAPI

Schema = dict[str, Any]
_STRING: Schema = {"type": "string"}
_REF = "#/components/schemas/{name}"
_URL = "^([dD][aA][tT][aA]|[hH][tT][tT][pP][sS]?|[fF][iI][lL][eE]|[mM][eE][dD][iI][aA]):"


@functools.cache
def openapi_document(
    needs_key: bool, max_choices: int, public: frozenset[str] = frozenset()
) -> OpenAPIDocument:
    """Describe the routes of a server whose clients need a key or not. ``max_choices``: of n.
    ``public``: paths that need none."""
    requests = _components([route.request for route in ROUTES])
    _add_checks(requests, max_choices)
    responses = _components(
        [r for route in ROUTES for r in (route.response, *route.failures.values())]
        + list({route.error: None for route in ROUTES})
    )
    for schema in responses.values():
        _require_defaults(schema)
    return OpenAPIDocument(
        info={"title": "Triptych", "version": __version__},
        paths={
            route.path: {route.method.lower(): _operation(route, route.path in public)}
            for route in ROUTES
        },
        components={
            "schemas": requests | responses,
            "securitySchemes": {
                "key": {"type": "http", "scheme": "bearer"},
                "key_header": {"type": "apiKey", "in": "header", "name": "x-api-key"},
            },
        },
        security=[{"key": []}, {"key_header": []}] if needs_key else [],
    )


def _components(types: list[Any]) -> dict[str, Schema]:
    structs = [t for t in types if isinstance(t, type) and issubclass(t, Struct)]
    return msgspec.json.schema_components(structs, ref_template=_REF)[1]


def _require_defaults(schema: Schema) -> None:
    """A response always has the fields that have a default: only UNSET fields are left out."""
    properties = schema.get("properties", {})
    constant = {name for name, field in properties.items() if "default" in field}
    schema["required"] = [
        name for name in properties if name in constant or name in schema["required"]
    ]
    for name in constant:
        properties[name] = {k: v for k, v in properties[name].items() if k != "default"}


def _operation(route: Route, public: bool) -> dict[str, Any]:
    summary = route.summary
    if route.access is Access.ADMIN and not public:
        summary += " Where keys are set, it needs the admin key."
    content = _content(route.response)
    if route.events is not None:
        content["text/event-stream"] = {"schema": _STRING}
    responses = {"200": {"description": "OK", "content": content}}
    for status, response in route.failures.items():
        responses[str(status)] = {"description": "Failure", "content": _content(response)}
    responses["default"] = {"description": "Error", "content": _content(route.error)}
    operation: dict[str, Any] = {"summary": summary, "responses": responses}
    if route.request is not None:
        operation["requestBody"] = {"required": True, "content": _content(route.request)}
    if route.parameter:
        operation["parameters"] = [
            {"name": route.parameter, "in": "path", "required": True, "schema": _STRING}
        ]
    if public or route.access is Access.OPEN:
        operation["security"] = []
    return operation


def _content(kind: type) -> dict[str, Any]:
    """Media type and schema of a body."""
    if kind is bytes:
        return {"*/*": {"schema": {}}}
    if kind is str:
        return {"text/plain": {"schema": _STRING}}
    return {"application/json": {"schema": {"$ref": _REF.format(name=kind.__name__)}}}


def _add_checks(components: dict[str, Schema], max_choices: int) -> None:
    """Add what the structs of requests can't say: settings, and values that checks refuse."""
    for struct in (ChatRequest, CompletionRequest, GenerateSampling):
        properties = components[struct.__name__]["properties"]
        n = {"type": "integer", "minimum": 1, "maximum": max_choices}
        properties["n"] = {"anyOf": [n, {"type": "null"}], "default": None}
        for branch in properties["logit_bias"]["anyOf"]:
            if branch["type"] == "object":
                branch["propertyNames"] = {"pattern": "^[0-9]+$"}
        _add_unsupported(properties, struct.UNSUPPORTED)
    _add_unsupported(components["GenerateRequest"]["properties"], GenerateRequest.UNSUPPORTED)
    for name in ("ImageURL", "ContentURL"):
        components[name]["properties"]["url"]["pattern"] = _URL
    message = components["ChatMessage"]
    silent = {"properties": {"role": {"const": "assistant"}}}
    spoken = {"required": ["content"], "properties": {"content": {"type": ["string", "array"]}}}
    message["anyOf"] = [silent, spoken]


def _add_unsupported(properties: dict[str, Schema], unsupported: Unsupported) -> None:
    for name, values in unsupported.items():
        properties[name] = {"enum": [None, *values]}
