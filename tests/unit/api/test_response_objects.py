"""Answers in the shape of the Responses API, over a pipeline that is a stub."""

import base64

import pytest

from triptych.api.response_objects import ResponsesFormat
from triptych.api.response_requests import ResponseRequest
from triptych.api.responses import (
    ChoiceOutput,
    CompletionTokensDetails,
    PromptTokensDetails,
    ReplyCall,
    ReplyParts,
    Usage,
)
from triptych.config import Limits
from triptych.errors import WorkerLost

PATH = "/v1/responses"
BODY = {"model": "tiny", "input": "Hi", "max_output_tokens": 8}
USAGE = Usage(10, 4, 14, PromptTokensDetails(7), CompletionTokensDetails(2))
CALLS = (ReplyCall(0, "c1", "look", "{}"), ReplyCall(1, "c2", "cut", '{"a'))


def completion(output, finish="stop"):
    kept = []
    request = ResponseRequest(model="m", input="Hi")
    format = ResponsesFormat(request, bytes, lambda *both: kept.append(both))
    choices = [format.choice(0, output, finish)]
    response = format.completion(id="i", created=1, model="m", choices=choices, usage=USAGE)
    assert kept == [(response, output.parts)]
    return response


def kinds(response):
    return [(item.__struct_config__.tag, item.status) for item in response.output]


def test_items_and_usage():
    response = completion(ChoiceOutput("", reply=ReplyParts("I look.", "Hm.", CALLS, True)))
    assert kinds(response) == [
        ("reasoning", "completed"), ("message", "completed"), ("function_call", "completed"),
        ("function_call", "completed"),
    ]  # fmt: skip
    assert response.output[0].content[0].text == "Hm."
    assert response.output[1].content[0].text == "I look."
    assert (response.output[2].call_id, response.output[3].arguments) == ("c1", '{"a')
    usage = response.usage
    assert (usage.input_tokens, usage.input_tokens_details.cached_tokens) == (10, 7)
    assert (usage.output_tokens, usage.output_tokens_details.reasoning_tokens) == (4, 2)
    only_calls = completion(ChoiceOutput("", reply=ReplyParts("", "", CALLS[:1], True)))
    assert kinds(only_calls) == [("function_call", "completed")]


def test_an_answer_that_was_cut():
    response = completion(ChoiceOutput("a"), "length")
    assert (response.status, response.incomplete_details.reason) == (
        "incomplete", "max_output_tokens",
    )  # fmt: skip
    assert kinds(response) == [("message", "incomplete")]


async def test_whole_and_streamed_are_the_same(web):
    fields = BODY | {"top_logprobs": 1, "instructions": "Be brief.", "metadata": {"a": "b"}}
    whole = (await web.ask(PATH, fields)).json
    reply = await web.ask(PATH, fields | {"stream": True})
    names, events = zip(*reply.named_events, strict=True)
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    assert names[:4] == (
        "response.created", "response.in_progress", "response.output_item.added",
        "response.content_part.added",
    )  # fmt: skip
    assert names[-4:] == (
        "response.output_text.done", "response.content_part.done", "response.output_item.done",
        "response.incomplete",
    )  # fmt: skip
    deltas = [e for n, e in zip(names, events, strict=True) if n == "response.output_text.delta"]
    text = whole["output"][0]["content"][0]
    assert "".join(delta["delta"] for delta in deltas) == text["text"] == events[-4]["text"]
    assert [token for delta in deltas for token in delta["logprobs"]] == text["logprobs"]
    last = events[-1]["response"]
    assert last["id"] == reply.headers["x-request-id"]
    for response in (whole, last):
        for item in (response, response["output"][0]):
            item.pop("id")
        response.pop("created_at")
    assert last == whole
    assert (whole["metadata"], whole["instructions"]) == ({"a": "b"}, "Be brief.")


async def test_an_error_in_a_stream_is_an_event(web):
    web.pipeline.error, web.pipeline.fail_after = WorkerLost("w-1 at 10.0.0.1"), 3
    name, event = (await web.ask(PATH, BODY | {"stream": True})).named_events[-1]
    assert name == "response.failed"
    assert event["response"]["status"] == "failed"
    assert event["response"]["error"]["code"] == "worker_lost"
    assert "10.0.0.1" not in event["response"]["error"]["message"]
    reply = await web.ask(f"{PATH}/{event['response']['id']}")
    assert (reply.status, reply.code) == (404, "response_not_found")


@pytest.mark.parametrize("stream", [False, True])
async def test_answers_are_continued_with_their_media(web, stream):
    picture = base64.b64encode(b"\x89PNG" + bytes(5000)).decode()
    content = [
        {"type": "input_image", "image_url": f"data:image/png;base64,{picture}"},
        {"type": "input_text", "text": "What?"},
    ]
    reply = await web.ask(PATH, BODY | {"input": [{"role": "user", "content": content}],
                                        "instructions": "Once.", "stream": stream})  # fmt: skip
    first = reply.named_events[-1][1]["response"] if stream else reply.json
    second = (await web.ask(PATH, BODY | {"previous_response_id": first["id"]})).json
    assert second["previous_response_id"] == first["id"]
    work = web.pipeline.works[-1]
    assert [bytes(item.data) for item in work.media] == [b"\x89PNG" + bytes(5000)]
    text = web.pipeline.tokenizer.library.decode(list(work.prompt))
    said = first["output"][0]["content"][0]["text"]
    assert "Once." not in text
    assert 0 < text.index("What?") < text.index(said) < text.index("Hi")
    assert (await web.ask(f"{PATH}/{second['id']}")).json == second


async def test_b60_what_is_not_stored_is_not_found(open_site):
    async with open_site() as web:
        hidden = (await web.ask(PATH, BODY | {"store": False})).json
        assert hidden["store"] is False
        reply = await web.ask(PATH, BODY | {"previous_response_id": hidden["id"]})
        assert (reply.status, reply.code) == (404, "response_not_found")
        assert reply.param == "previous_response_id"
    async with open_site(Limits(stored_responses=0)) as web:
        assert (await web.ask(PATH, BODY | {"store": True})).json["store"] is False


async def test_b60_another_key_does_not_find_it(open_site):
    async with open_site(api_key="a,b") as web:
        keys = [{"Authorization": f"Bearer {key}"} for key in "ab"]
        first = (await web.ask(PATH, BODY, headers=keys[0])).json
        further = BODY | {"previous_response_id": first["id"]}
        assert (await web.ask(PATH, further, headers=keys[1])).code == "response_not_found"
        assert (await web.ask(f"{PATH}/{first['id']}", headers=keys[1])).status == 404
        assert (await web.ask(PATH, further, headers=keys[0])).status == 200


async def test_errors_name_the_item(web):
    bad = [{"type": "input_text", "text": "x"},
           {"type": "input_image", "image_url": "data:image/png;base64,a*"}]  # fmt: skip
    fields = {"input": [{"role": "user", "content": bad}], "instructions": "S"}
    reply = await web.ask(PATH, BODY | fields)
    assert (reply.code, reply.param) == ("invalid_data_url", "input[0].content[1]")
    bad[1]["image_url"] = "gopher://x"
    first = (await web.ask(PATH, BODY)).json
    reply = await web.ask(PATH, BODY | fields | {"previous_response_id": first["id"]})
    assert (reply.code, reply.param) == ("unsupported_url_scheme", "input[0].content[1]")
    reply = await web.ask(PATH, BODY | {"max_output_tokens": 1 << 30})
    assert (reply.code, reply.param) == ("context_length_exceeded", "input")


async def test_media_of_all_turns_are_counted(open_site):
    content = [{"type": "input_image", "image_url": "data:image/png;base64,AAAA"}]
    fields = BODY | {"input": [{"role": "user", "content": content}]}
    async with open_site(Limits(media_items=1)) as web:
        first = (await web.ask(PATH, fields)).json
        reply = await web.ask(PATH, fields | {"previous_response_id": first["id"]})
    assert (reply.status, reply.code, reply.param) == (400, "too_many_media", "input")
