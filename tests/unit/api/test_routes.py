"""Every route of the table: what it takes and answers, and how /openapi.json describes it."""

import inspect
import json
import re
import typing
from pathlib import Path

import jsonschema
import msgspec
import pytest

from triptych.api.requests import ChatRequest
from triptych.api.responses import ErrorResponse
from triptych.api.routes import ROUTES, Access, find_route
from triptych.config import Config, Limits

PLAIN = {"model": "tiny", "prompt": "a"}
CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "Hi"}]}
MESSAGES = CHAT | {"max_tokens": 8}
IDS = {"return_token_ids": True}
REQUESTS = {  # of each path: what is sent, and with which method
    "/v1/chat/completions": [CHAT, CHAT | IDS | {"n": 2, "logprobs": True, "top_logprobs": 2}],
    "/v1/completions": [PLAIN, PLAIN | IDS | {"logprobs": 2}, PLAIN | {"prompt": ["a", "b"]}],
    "/inference/v1/generate": [
        {"token_ids": [5, 6], "sampling_params": {}},
        {"token_ids": [5], "sampling_params": {"n": 2, "logprobs": 2}, "request_id": "mine"},
    ],
    "/v1/messages": [MESSAGES, MESSAGES | {"system": "Be brief.", "stop_sequences": ["there"]}],
    "/v1/messages/count_tokens": [CHAT],
    "/v1/responses": [
        {"model": "tiny", "input": "Hi", "max_output_tokens": 8},
        {
            "model": "tiny",
            "input": CHAT["messages"],
            "instructions": "Be brief.",
            "max_output_tokens": 8,
            "top_logprobs": 2,
            "metadata": {"a": "b"},
        },
    ],
    "/v1/media": [b"a file"],
    "/tokenize": [{"prompt": "a"}, {"messages": CHAT["messages"]}],
    "/detokenize": [{"tokens": [5]}],
}


def by_path(route):
    return route.path


def is_struct(kind):
    return isinstance(kind, type) and issubclass(kind, msgspec.Struct)


@pytest.mark.parametrize("route", ROUTES, ids=by_path)
def test_a_route_has_a_response_struct_that_its_handler_returns(route):
    plain = {("/metrics", str), ("/ping", str)}
    assert is_struct(route.response) or (route.path, route.response) in plain
    hints = typing.get_type_hints(route.handler)
    assert hints["return"] in (route.response, route.response | None, type(None))
    assert route.summary


@pytest.mark.parametrize("route", ROUTES, ids=by_path)
def test_a_handler_takes_what_its_route_declares(route):
    hints = typing.get_type_hints(route.handler)
    _, _, *rest = inspect.signature(route.handler).parameters
    if is_struct(route.request):
        assert rest == ["request", "media"]
        assert hints["request"] is route.request
    else:
        assert rest == ([route.parameter] if route.parameter else [])


def test_paths_are_unique_and_found():
    assert len({route.path for route in ROUTES}) == len(ROUTES)
    for route in ROUTES:
        assert find_route(route.path) is route
    assert find_route("/v1/models/a/b").parameter == "model"
    for path in ("/v1/models/", "/v1", "/v1/models2", "/"):
        assert find_route(path) is None


@pytest.mark.parametrize("route", ROUTES, ids=by_path)
async def test_other_methods_get_405_and_options_says_which(web, route):
    other = "POST" if route.method != "POST" else "GET"
    path = route.path.partition("{")[0] + route.parameter
    reply = await web.ask(path, method=other)
    assert (reply.status, reply.code) == (405, "method_not_allowed")
    assert route.method.lower() in reply.headers["allow"]
    assert (await web.ask(path, method="OPTIONS")).status == 200


@pytest.mark.parametrize("route", ROUTES, ids=by_path)
async def test_access(open_site, route):
    path = route.path.partition("{")[0] + "tiny" * bool(route.parameter)
    async with open_site(api_key="user", admin_key="boss") as web:

        async def status(key):
            headers = {} if key is None else {"Authorization": f"Bearer {key}"}
            body = REQUESTS.get(route.path, [None])[0]
            return (await web.ask(path, body, route.method, headers)).status

        allowed = {key: await status(key) not in (401, 403) for key in (None, "user", "boss")}
    assert allowed == {
        None: route.access is Access.OPEN,
        "user": route.access is not Access.ADMIN,
        "boss": True,
    }


# --- responses


def stored_response():
    return "/v1/responses", REQUESTS["/v1/responses"][0]


def check(struct, raw):
    """Strictly: nothing is missing, of another type, or left over."""
    decoded = msgspec.json.decode(raw, type=struct, strict=True)
    assert json.loads(msgspec.json.encode(decoded)) == json.loads(raw)


@pytest.mark.parametrize("route", ROUTES, ids=by_path)
async def test_responses_are_what_the_route_and_the_document_say(web, route):
    document = (await web.ask("/openapi.json")).json
    (operation,) = document["paths"][route.path].values()
    path = route.path
    if route.path == "/v1/media/{id}":
        path = (await web.ask("/v1/media", b"x")).json["id"].replace("media://", "/v1/media/")
    if route.path == "/v1/audio/transcriptions":
        pytest.skip("test_transcriptions.py has it: it needs a form, and a model that hears")
    if route.path == "/v1/responses/{id}":
        path = "/v1/responses/" + (await web.ask(*stored_response())).json["id"]
    for body in REQUESTS.get(route.path, [None]):
        reply = await web.ask(path.replace("{model}", "tiny"), body, route.method)
        assert reply.status == 200
        if route.response is not str:
            check(route.response, reply.body)
            content = operation["responses"]["200"]["content"]["application/json"]
            validate(content["schema"], document, reply.json)


CHUNKED = [
    route for route in ROUTES if is_struct(route.events)
]  # others have events of several types


@pytest.mark.parametrize("route", CHUNKED, ids=by_path)
@pytest.mark.parametrize("usage", [False, True])
async def test_streamed_events_are_what_the_route_says(web, route, usage):
    options = {"stream": True} | ({"stream_options": {"include_usage": True}} if usage else {})
    for body in REQUESTS[route.path]:
        events = (await web.ask(route.path, body | options)).events
        assert len(events) > 5
        assert events.pop() == "[DONE]"
        for event in events:
            check(route.events, json.dumps(event))
            assert ("usage" in event) == usage


@pytest.mark.parametrize("route", [r for r in ROUTES if r.events and r not in CHUNKED], ids=by_path)
async def test_streamed_events_are_named_as_their_type(web, route):
    for body in REQUESTS[route.path]:
        reply = await web.ask(route.path, body | {"stream": True})
        names, data = zip(*reply.named_events, strict=True)
        assert len(names) > 5
        for name, event in zip(names, data, strict=True):
            check(route.events, json.dumps(event))
            assert event["type"] == name


async def test_errors_are_what_the_document_says(web):
    document = (await web.ask("/openapi.json")).json
    web.pipeline.absent = ("D",)
    unready = await web.ask("/health")
    assert unready.status == 503
    content = document["paths"]["/health"]["get"]["responses"]["503"]["content"]
    validate(content["application/json"]["schema"], document, unready.json)
    for reply in (await web.ask("/nothing"), await web.chat(n=-1), await web.ask("/live", b"{}")):
        check(ErrorResponse, reply.body)
        validate({"$ref": "#/components/schemas/ErrorResponse"}, document, reply.json)


def validate(schema, document, value):
    components = {"components": document["components"]}
    jsonschema.Draft202012Validator(schema | components).validate(value)


# --- the document


async def test_openapi_lists_every_route(web):
    document = (await web.ask("/openapi.json")).json
    assert {(path, *operations) for path, operations in document["paths"].items()} == {
        (route.path, route.method.lower()) for route in ROUTES
    }
    text = json.dumps(document)
    for name in document["components"]["schemas"]:
        assert f"#/components/schemas/{name}" in text


async def test_openapi_responses_require_all_that_is_always_there(web):
    schemas = (await web.ask("/openapi.json")).json["components"]["schemas"]
    whole = schemas["ChatCompletion"]
    unset = {"prompt_token_ids", "prompt_logprobs"}
    assert set(whole["required"]) == set(whole["properties"]) - unset
    assert schemas["ClusterWorker"]["required"] == list(schemas["ClusterWorker"]["properties"])


async def test_openapi_lists_the_accepted_fields(open_site):
    async with open_site(Limits(choices=3)) as web:
        document = (await web.ask("/openapi.json")).json
    schemas = document["components"]["schemas"]
    chat = schemas["ChatRequest"]["properties"]
    assert chat["n"]["anyOf"][0]["maximum"] == 3
    assert chat["messages"]["minItems"] == 1
    assert chat["best_of"] == {"enum": [None, 1]}
    assert {"$ref": "#/components/schemas/ResponseFormat"} in chat["response_format"]["anyOf"]
    types = schemas["ResponseFormat"]["properties"]["type"]["enum"]
    assert sorted(types) == ["json_object", "json_schema", "text"]
    stop = {branch["type"]: branch for branch in chat["stop"]["anyOf"]}
    assert stop["array"]["maxItems"] == 16
    assert stop["string"]["minLength"] == stop["array"]["items"]["minLength"] == 1
    bias = next(b for b in chat["logit_bias"]["anyOf"] if b["type"] == "object")
    assert bias["propertyNames"] == {"pattern": "^[0-9]+$"}
    detail, null = schemas["ImageURL"]["properties"]["detail"]["anyOf"]
    assert (set(detail["enum"]), null["type"]) == ({"auto", "low", "high", "original"}, "null")
    assert schemas["CompletionRequest"]["properties"]["best_of"] == {"enum": [None, 1]}
    silent, said = schemas["ChatMessage"]["anyOf"]
    assert silent["properties"]["role"] == {"const": "assistant"}
    assert said["required"] == ["content"]
    assert ChatRequest.__name__ in schemas


def test_help_and_documents_name_every_route_that_is_open():
    open_paths = {route.path for route in ROUTES if route.access is Access.OPEN}
    hints = typing.get_type_hints(Config, include_extras=True)
    root = Path(__file__).parents[3]
    said = {
        "--help": hints["public_routes"].__metadata__[0].description.partition("separated")[0],
        "SECURITY.md": between(root / "SECURITY.md", "every route requires a key but", "those of"),
        "docs/interface.md": between(root / "docs/interface.md", "", "never need a key"),
        "docs/operations.md": between(root / "docs/operations.md", "opens routes besides", ";"),
    }
    for place, text in said.items():
        assert set(re.findall(r"/[a-z]+", text)) == open_paths, place


def between(file, start, end):
    """What stands between them, on one line."""
    (line,) = [line for line in file.read_text().splitlines() if start in line and end in line]
    return line.partition(start)[2].partition(end)[0] if start else line.partition(end)[0]
