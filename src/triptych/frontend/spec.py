"""/openapi.json, made from the structs that read the requests."""

from __future__ import annotations

import functools
from typing import Any

import msgspec

from triptych import __version__
from triptych.frontend.openai import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    TokenizeRequest,
)

_POSTS: dict[str, tuple[type[msgspec.Struct], str]] = {
    "/v1/chat/completions": (ChatRequest, "Answer a chat; with stream=true as server-sent events."),
    "/v1/completions": (CompletionRequest, "Go on from a prompt, or from each of several."),
    "/tokenize": (TokenizeRequest, "Token ids of a prompt or of a chat."),
    "/detokenize": (DetokenizeRequest, "Text of token ids."),
}
_GETS = {
    "/v1/models": "The model that is served.",
    "/health": "200 while every role has a ready worker, else 503 with those that are missing.",
    "/live": "200 while the process answers.",
    "/metrics": "Prometheus text.",
    "/openapi.json": "This document.",
    "/cluster": "Every worker's account of itself.",
}
_FAILED = {"$ref": "#/components/schemas/Error"}
_ERROR = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": "string"},
            },
        }
    },
}


@functools.cache
def document(keyed: bool) -> bytes:
    """The description; ``keyed`` tells that clients need an API key."""
    schemas, components = msgspec.json.schema_components(
        [kind for kind, _ in _POSTS.values()], ref_template="#/components/schemas/{name}"
    )
    paths: dict[str, Any] = {
        path: {"get": {"summary": about, "responses": _responses()}}
        for path, about in _GETS.items()
    }
    for (path, (_, about)), schema in zip(_POSTS.items(), schemas, strict=True):
        content = {"application/json": {"schema": schema}}
        paths[path] = {
            "post": {
                "summary": about,
                "requestBody": {"required": True, "content": content},
                "responses": _responses(),
            }
        }
    for path in ("/health", "/live"):
        paths[path]["get"]["security"] = []
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


def _responses() -> dict[str, Any]:
    failed = {"description": "Error", "content": {"application/json": {"schema": _FAILED}}}
    return {"200": {"description": "OK"}, "default": failed}
