"""/openapi.json: requests from the structs that read them, answers written out by hand.

What the structs can't say of themselves (a limit that is a setting, a value that a check refuses)
is added here, so that what the document allows is what the server takes.
"""

from __future__ import annotations

import functools
from typing import Any

import msgspec

from triptych import __version__
from triptych.api.requests import (
    ChatMessage,
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    TokenizeRequest,
    Unsupported,
)

Schema = dict[str, Any]


def _object(**properties: Schema) -> Schema:
    """All of them are always there."""
    return {"type": "object", "required": list(properties), "properties": properties}


def _list(items: Schema) -> Schema:
    return {"type": "array", "items": items}


_STRING: Schema = {"type": "string"}
_NUMBER: Schema = {"type": "integer"}
_ANY: Schema = {"type": "object"}
_OR_NULL: Schema = {"type": ["object", "null"]}
_FINISH: Schema = {"enum": ["stop", "length"]}
_IDS = _list(_NUMBER)
_ERROR = _object(
    error=_object(message=_STRING, type=_STRING, param={"type": ["string", "null"]}, code=_STRING)
)
_USAGE = _object(
    prompt_tokens=_NUMBER,
    completion_tokens=_NUMBER,
    total_tokens=_NUMBER,
    prompt_tokens_details=_object(cached_tokens=_NUMBER),
)
_MODEL = _object(
    id=_STRING,
    object={"const": "model"},
    created=_NUMBER,
    owned_by=_STRING,
    max_model_len=_NUMBER,
    modalities=_list({"enum": ["text", "image", "video", "audio"]}),
)
_MEDIA = _object(
    id=_STRING, object={"const": "media"}, bytes=_NUMBER, created_at=_NUMBER, expires_at=_NUMBER
)
_DELETED = _object(id=_STRING, object={"const": "media"}, deleted={"const": True})
_URL = "^([dD][aA][tT][aA]|[hH][tT][tT][pP][sS]?|[fF][iI][lL][eE]|[mM][eE][dD][iI][aA]):"
_OK = _object(status={"const": "ok"})
_UNREADY = _object(status={"enum": ["unready", "draining"]})
_UNREADY["properties"]["missing"] = _list(_STRING)


def _completion(kind: str, said: dict[str, Schema]) -> Schema:
    choice = _object(index=_NUMBER, logprobs=_OR_NULL, finish_reason=_FINISH, **said)
    choice["properties"]["token_ids"] = _IDS
    whole = _object(
        id=_STRING,
        object={"const": kind},
        created=_NUMBER,
        model=_STRING,
        choices=_list(choice),
        usage=_USAGE,
    )
    whole["properties"]["prompt_token_ids"] = _IDS
    return whole


_SAID = _object(role={"const": "assistant"}, content=_STRING)
_POSTS: dict[str, tuple[type[msgspec.Struct], str, Schema]] = {
    "/v1/chat/completions": (
        ChatRequest,
        "Answer a chat; with stream=true as server-sent events.",
        _completion("chat.completion", {"message": _SAID}),
    ),
    "/v1/completions": (
        CompletionRequest,
        "Go on from a prompt, or from each of several.",
        _completion("text_completion", {"text": _STRING}),
    ),
    "/tokenize": (
        TokenizeRequest,
        "Token ids of a prompt or of a chat.",
        _object(count=_NUMBER, max_model_len=_NUMBER, tokens=_IDS),
    ),
    "/detokenize": (DetokenizeRequest, "Text of token ids.", _object(prompt=_STRING)),
}
_ADMIN = "Where keys are set, it needs the admin key."
_GETS: dict[str, tuple[str, Schema]] = {
    "/v1/models": (
        "The model that is served.",
        _object(object={"const": "list"}, data=_list(_MODEL)),
    ),
    "/v1/models/{model}": ("The same, by its name.", _MODEL),
    "/health": ("200 while every role has a ready worker, else 503 with those missing.", _OK),
    "/live": ("200 while the process answers.", _OK),
    "/metrics": (f"Prometheus text. {_ADMIN}", _STRING),
    "/openapi.json": ("This document.", _ANY),
    "/cluster": (
        f"Every worker's account of itself, and why others that are there are not used. {_ADMIN}",
        _object(
            topology=_STRING,
            discovery=_ANY,
            frontend=_ANY,
            workers=_list(_ANY),
            unused=_list(_ANY),
        ),
    ),
}


@functools.cache
def openapi_document(keyed: bool, choices: int) -> bytes:
    """The description; ``keyed`` tells that clients need an API key, ``choices`` the largest n."""
    schemas, components = msgspec.json.schema_components(
        [kind for kind, _, _ in _POSTS.values()], ref_template="#/components/schemas/{name}"
    )
    _narrow(components, choices)
    paths: dict[str, Any] = {
        path: {"get": {"summary": about, "responses": _responses(answer)}}
        for path, (about, answer) in _GETS.items()
    }
    for (path, (_, about, answer)), schema in zip(_POSTS.items(), schemas, strict=True):
        paths[path] = {
            "post": {
                "summary": about,
                "requestBody": {"required": True, "content": _content(schema)},
                "responses": _responses(answer),
            }
        }
    paths |= _uploads()
    for path in ("/v1/chat/completions", "/v1/completions"):
        answers = paths[path]["post"]["responses"]["200"]["content"]
        answers["text/event-stream"] = {"schema": _STRING}
    paths["/metrics"]["get"]["responses"]["200"]["content"] = {"text/plain": {"schema": _STRING}}
    for path in ("/health", "/live"):
        paths[path]["get"]["security"] = []
    unready = {"description": "Not ready", "content": _content(_UNREADY)}
    paths["/health"]["get"]["responses"]["503"] = unready
    paths["/v1/models/{model}"]["get"]["parameters"] = [_in_path("model")]
    return msgspec.json.encode(
        {
            "openapi": "3.1.0",
            "info": {"title": "Triptych", "version": __version__},
            "paths": paths,
            "components": {
                "schemas": {**components, "Error": _ERROR},
                "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
            },
            "security": [{"key": []}] if keyed else [],
        }
    )


def _uploads() -> dict[str, Any]:
    """The routes that take and give no JSON of a struct."""
    keep: dict[str, Any] = {
        "summary": "Keep a media file for later requests of the same key.",
        "requestBody": {"required": True, "content": {"*/*": {"schema": {}}}},
        "responses": _responses(_MEDIA),
    }
    drop: dict[str, Any] = {
        "summary": "Forget an upload, by the part of its id after media://.",
        "parameters": [_in_path("id")],
        "responses": _responses(_DELETED),
    }
    return {"/v1/media": {"post": keep}, "/v1/media/{id}": {"delete": drop}}


def _in_path(name: str) -> dict[str, Any]:
    return {"name": name, "in": "path", "required": True, "schema": _STRING}


def _narrow(components: dict[str, Schema], choices: int) -> None:
    """Add to the structs' schemas what the checks behind them refuse and leave out."""
    for struct in (ChatRequest, CompletionRequest):
        properties = components[struct.__name__]["properties"]
        properties["n"] = _nullable({"type": "integer", "minimum": 1, "maximum": choices})
        for branch in properties["logit_bias"]["anyOf"]:
            if branch["type"] == "object":
                branch["propertyNames"] = {"pattern": "^[0-9]+$"}
        _add_off(properties, struct.OFF)
    chat = components["ChatRequest"]["properties"]
    chat["response_format"] = {"enum": [None, {"type": "text"}]}
    components["ImageURL"]["properties"]["detail"] = {"enum": [None, "auto"]}
    for name in ("ImageURL", "MediaURL"):
        components[name]["properties"]["url"]["pattern"] = _URL
    message = components["ChatMessage"]
    _add_off(message["properties"], ChatMessage.OFF)
    silent = {"properties": {"role": {"const": "assistant"}}}
    said = {"required": ["content"], "properties": {"content": {"type": ["string", "array"]}}}
    message["anyOf"] = [silent, said]


def _add_off(properties: dict[str, Schema], off: Unsupported) -> None:
    for name, values in off.items():
        properties[name] = {"enum": [None, *values]}


def _nullable(schema: Schema) -> Schema:
    return {"anyOf": [schema, {"type": "null"}], "default": None}


def _content(schema: Schema) -> dict[str, Any]:
    return {"application/json": {"schema": schema}}


def _responses(answer: Schema) -> dict[str, Any]:
    failed = {"description": "Error", "content": _content({"$ref": "#/components/schemas/Error"})}
    return {"200": {"description": "OK", "content": _content(answer)}, "default": failed}
