"""Routes and completions over a stub pipeline, by hand and with the official client."""

import asyncio
import base64
import json
import logging
import math
import re
import weakref

import msgspec
import openai
import pytest

from triptych import errors
from triptych.api import app
from triptych.api.request_body import decode_request
from triptych.api.requests import derive_seed
from triptych.config import Limits
from triptych.observe.log import RateLimitedLog
from triptych.runtime.discovery import DiscoveryStatus

HI = [{"role": "user", "content": "Hi"}]
TEXT = "Hello there, wörld! 🎉 done"
PICTURE = base64.b64encode(bytes(range(256)) * 40).decode()


def picture(data=PICTURE, **more):
    url = f"data:image/png;base64,{data}"
    return {"type": "image_url", "image_url": {"url": url} | more}


def test_every_fault_of_the_server_has_a_text():
    def below(kind):
        return [kind, *(leaf for sub in kind.__subclasses__() for leaf in below(sub))]

    codes = {kind.code for kind in below(errors.ServiceError) if kind.status >= 500}
    assert codes <= app.PUBLIC_MESSAGES.keys()


@pytest.mark.parametrize(
    ("kind", "advice"),
    [
        (errors.BrokenInstallation, "triptych doctor"),
        (errors.DecoderLost, "Try again later"),
        (errors.ServiceError, "Try again"),
    ],
)
async def test_a_fault_of_the_server_says_what_to_do_and_names_no_library(web, kind, advice):
    web.pipeline.error = kind("pillow 13.0.0 in /usr/lib")
    error = (await web.chat("Hi")).json["error"]
    assert error["code"] == kind.code
    assert advice in error["message"]
    assert "pillow" not in error["message"]


async def test_chat(web):
    reply = await web.chat("Hi", temperature=0.5, top_k=7, seed=5, stop=["zzz"], user="me")
    assert reply.status == 200
    answer = reply.json
    assert answer["object"] == "chat.completion"
    assert answer["model"] == "tiny"
    assert answer["id"].startswith("chatcmpl-")
    (choice,) = answer["choices"]
    assert choice["message"] == {"role": "assistant", "content": TEXT}
    assert choice["finish_reason"] == "length"
    count = len(web.pipeline.ids)
    (work,) = web.pipeline.works
    assert answer["usage"] == {
        "prompt_tokens": len(work.prompt),
        "completion_tokens": count,
        "total_tokens": len(work.prompt) + count,
        "prompt_tokens_details": {"cached_tokens": 1},
    }
    assert (work.sampling.temperature, work.sampling.top_k, work.sampling.seed) == (0.5, 7, 5)
    assert work.sampling.max_tokens is None
    assert reply.headers["server-timing"] == (
        "queue;dur=1.000, prefill;dur=2.000, decode;dur=3.000"
    )
    assert reply.headers["x-request-id"] == answer["id"]


async def test_defaults_and_drawn_seeds(web):
    await web.chat()
    await web.chat()
    first, second = (work.sampling for work in web.pipeline.works)
    assert first.temperature == first.top_p == first.repetition_penalty == 1.0
    assert first.seed != second.seed
    assert web.pipeline.works[0].id != web.pipeline.works[1].id


async def test_all_parameters_reach_the_work(web):
    given = {
        "max_tokens": 3, "top_p": 0.5, "min_p": 0.1, "presence_penalty": 1.5,
        "frequency_penalty": -1.5, "repetition_penalty": 1.2, "stop_token_ids": [7],
        "ignore_eos": True, "logit_bias": {"3": -2.5}, "top_k": 5, "temperature": 0.7, "seed": 11,
        "min_tokens": 2, "bad_words": ["a"], "allowed_token_ids": [9, 8, 9], "prompt_logprobs": 1,
    }  # fmt: skip
    assert (await web.chat(**given, cache_salt="mine", logprobs=True)).status == 200
    (work,) = web.pipeline.works
    given |= {"stop_token_ids": (7,), "logit_bias": {3: -2.5}, "logprobs": 0, "grammar": None}
    ids = web.pipeline.tokenizer.ids
    given |= {"bad_words": (tuple(ids("a")), tuple(ids(" a"))), "allowed_token_ids": (9, 8)}
    assert msgspec.structs.asdict(work.sampling) == given, "a new field of Sampling belongs here"
    assert work.salt == "\nmine"  # no tenant before it


async def test_null_is_absent(web):
    messages = [{"role": "user", "content": "Hi", "name": None, "tool_calls": None}]
    fields = {"tools": None, "response_format": None, "logit_bias": {"3": 1}, "n": None}
    fields |= {"stream": True, "stream_options": {"include_usage": None}}
    reply = await web.chat(messages=messages, **fields)
    assert reply.status == 200
    assert web.pipeline.works[0].sampling.logit_bias == {3: 1.0}
    assert (await web.chat(response_format={"type": "text"})).status == 200
    assert (await web.chat(colour=None)).status == 200
    reply = await web.chat(messages=[{"role": "user", "content": "Hi", "colour": "red"}])
    assert reply.status == 200


OFF = {
    "tools": [], "tool_choice": "none", "parallel_tool_calls": True,
    "functions": [], "modalities": ["text"],
}  # fmt: skip
ON = {
    "modalities": ["text", "audio"], "best_of": 2,
}  # fmt: skip


async def test_parameters_that_are_off_are_accepted_and_refused_when_on(web):
    tidy = {"role": "assistant", "content": "Hi", "tool_calls": [], "refusal": None}
    reply = await web.chat(messages=[tidy, *HI], **OFF)
    assert reply.status == 200
    plain = {"model": "tiny", "prompt": "a"}
    off = {"echo": False, "best_of": 1, "suffix": ""}
    assert (await web.ask("/v1/completions", plain | off)).status == 200
    for name, value in (("best_of", 2), ("best_of", True), ("suffix", "x")):
        reply = await web.ask("/v1/completions", plain | {name: value})
        assert (reply.code, reply.param) == ("unsupported_parameter", name)
    for name, value in ON.items():
        reply = await web.chat(**OFF | {name: value})
        assert (reply.code, reply.param) == ("unsupported_parameter", name)


async def test_tiny_temperature_is_greedy(web):
    await web.chat(temperature=1e-9)
    assert web.pipeline.works[0].sampling.temperature == 0


async def test_stream(web):
    reply = await web.chat(stream=True, stream_options={"include_usage": True})
    assert reply.headers["content-type"].startswith("text/event-stream")
    *chunks, last, done = reply.events
    assert done == "[DONE]"
    assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    texts = [chunk["choices"][0]["delta"].get("content", "") for chunk in chunks]
    assert "".join(texts) == TEXT
    assert "\ufffd" not in "".join(texts)
    assert [c["choices"][0]["finish_reason"] for c in chunks] == [None] * (len(chunks) - 1) + [
        "length"
    ]
    assert all(chunk["usage"] is None for chunk in chunks)
    assert last["choices"] == []
    assert last["usage"]["completion_tokens"] == len(web.pipeline.ids)
    assert len({chunk["id"] for chunk in [*chunks, last]}) == 1


async def test_a_stream_with_usage_has_its_timings_in_a_comment_before_its_end(web):
    reply = await web.chat(stream=True, stream_options={"include_usage": True})
    comment, done = reply.body.split(b"\n\n")[-3:-1]
    assert comment == b": server-timing: queue;dur=1.000, prefill;dur=2.000, decode;dur=3.000"
    assert done == b"data: [DONE]"


async def test_stream_without_usage(web):
    reply = await web.chat(stream=True)
    assert not any("usage" in event for event in reply.events[:-1])
    assert b"server-timing" not in reply.body


async def test_stop_string_ends_the_run(web):
    web.pipeline.endless = True
    reply = await web.chat(stop=["wör"])
    (choice,) = reply.json["choices"]
    assert choice["message"]["content"] == "Hello there, "
    assert choice["finish_reason"] == "stop"
    assert len(web.pipeline.cancelled) == 1
    assert reply.json["usage"]["completion_tokens"] < len(web.pipeline.ids)
    assert web.app.metrics.in_flight == 0


async def test_stop_string_in_a_stream(web):
    web.pipeline.endless = True
    events = (await web.chat(stream=True, stop="ld!", n=2)).events
    for index in range(2):
        mine = [e["choices"][0] for e in events[:-1] if e["choices"][0]["index"] == index]
        assert "".join(c["delta"].get("content", "") for c in mine) == "Hello there, wör"
        assert mine[-1]["finish_reason"] == "stop"
    assert len(web.pipeline.cancelled) == 2
    assert events[-1] == "[DONE]"


async def test_stop_string_at_the_very_end(web):
    """The last token completes it: the run ends by itself and nothing is left to cancel."""
    reply = await web.chat(stop=["done"])
    (choice,) = reply.json["choices"]
    assert choice["message"]["content"] == "Hello there, wörld! 🎉 "
    assert choice["finish_reason"] == "stop"
    assert web.pipeline.cancelled == []


async def test_several_choices(web):
    reply = await web.chat(n=3, seed=11)
    choices = reply.json["choices"]
    assert [c["index"] for c in choices] == [0, 1, 2]
    seeds = [work.sampling.seed for work in web.pipeline.works]
    assert seeds == [11, derive_seed(11, 1), derive_seed(11, 2)]
    assert len(set(seeds)) == 3
    assert len({work.id for work in web.pipeline.works}) == 3
    usage = reply.json["usage"]
    assert usage["prompt_tokens"] == len(web.pipeline.works[0].prompt)
    assert usage["completion_tokens"] == 3 * len(web.pipeline.ids)


async def test_one_failed_choice_fails_all(web):
    web.pipeline.error = errors.WorkerLost("at 127.0.0.1:4711")
    reply = await web.chat(n=3)
    assert (reply.status, reply.code) == (503, "worker_lost")
    assert b"4711" not in reply.body


async def test_token_ids(web):
    whole = (await web.chat(return_token_ids=True)).json
    (work,) = web.pipeline.works
    assert work.return_prompt_ids
    assert whole["prompt_token_ids"] == list(work.prompt)
    assert whole["choices"][0]["token_ids"] == web.pipeline.ids
    events = (await web.chat(return_token_ids=True, stream=True)).events[:-1]
    assert events[0]["prompt_token_ids"] == list(work.prompt)
    assert not any("prompt_token_ids" in event for event in events[1:])
    ids = [id for event in events for id in event["choices"][0].get("token_ids", [])]
    assert ids == web.pipeline.ids


@pytest.mark.parametrize("stream", [False, True])
async def test_logprobs(web, stream):
    reply = await web.chat(logprobs=True, top_logprobs=2, stream=stream)
    events = reply.events[:-1] if stream else [reply.json]
    content = [
        token
        for event in events
        if (logprobs := event["choices"][0]["logprobs"]) is not None
        for token in logprobs["content"]
    ]
    assert len(content) == len(web.pipeline.ids)
    assert bytes(b for token in content for b in token["bytes"]).decode() == TEXT
    assert all(token["logprob"] == -0.5 for token in content)
    assert all([t["logprob"] for t in token["top_logprobs"]] == [-0.5, -1.5] for token in content)


async def test_completion(web):
    body = {"model": "tiny", "prompt": "Once", "logprobs": 1, "return_token_ids": True}
    body["max_tokens"] = len(web.pipeline.ids)
    answer = (await web.ask("/v1/completions", body)).json
    assert answer["object"] == "text_completion"
    (choice,) = answer["choices"]
    assert choice["text"] == TEXT
    logprobs = choice["logprobs"]
    assert len(logprobs["tokens"]) == len(web.pipeline.ids)
    assert logprobs["text_offset"][:2] == [0, len(logprobs["tokens"][0])]
    assert logprobs["token_logprobs"] == [-0.5] * len(web.pipeline.ids)
    assert choice["prompt_token_ids"] == answer["prompt_token_ids"]


@pytest.mark.parametrize(
    ("prompt", "count"),
    [("a", 1), (["a", "b"], 2), ([5, 6], 1), ([[5], [6, 7]], 2), (["a", [5]], 2)],
)
async def test_several_prompts(web, prompt, count):
    body = {"model": "tiny", "prompt": prompt, "n": 2, "seed": 3, "max_tokens": 2}
    answer = (await web.ask("/v1/completions", body)).json
    assert [c["index"] for c in answer["choices"]] == list(range(2 * count))
    works = web.pipeline.works
    assert [w.sampling.seed for w in works] == [3, derive_seed(3, 1)] * count
    assert answer["usage"]["prompt_tokens"] == sum(len(w.prompt) for w in works[::2])
    assert answer["usage"]["completion_tokens"] == 4 * count


async def test_completion_stream(web):
    body = {"model": "tiny", "prompt": "Once", "stream": True, "max_tokens": len(web.pipeline.ids)}
    *events, done = (await web.ask("/v1/completions", body)).events
    assert "".join(event["choices"][0]["text"] for event in events) == TEXT
    assert events[-1]["choices"][0]["finish_reason"] == "length"
    assert done == "[DONE]"


# --- media


async def test_pictures_reach_the_work_as_bytes(web):
    text = {"type": "text", "text": "Which?"}
    reply = await web.chat([picture(), text, picture("AAAA", detail="auto")], max_tokens=1)
    assert reply.status == 200
    (work,) = web.pipeline.works
    assert [bytes(item.data) for item in work.media] == [bytes(range(256)) * 40, b"\0\0\0"]


@pytest.mark.parametrize(
    ("url", "code"),
    [
        ("ftp://x/a.png", "unsupported_url_scheme"),
        ("slice:0", "unsupported_url_scheme"),
        ("", "unsupported_url_scheme"),
        ("data:", "invalid_data_url"),
        ("data:image/png,abc", "invalid_data_url"),
        ("data:image/png;base64,%%%%", "invalid_data_url"),
        ("data:image/png;base64,AAA", "invalid_data_url"),
        ("data:image/png;base64,AA\nAA", "invalid_data_url"),
        ("data:image/png;base64,AA AA", "invalid_data_url"),
        ("data:image/png;base64,\u00e9AAA", "invalid_data_url"),
        ("data:text/html;base64,AAAA", "unsupported_media_type"),
    ],
)
async def test_urls_that_are_refused(web, url, code):
    part = {"type": "image_url", "image_url": {"url": url}}
    reply = await web.chat([{"type": "text", "text": "a"}, part])
    assert (reply.status, reply.code) == (400, code)
    assert reply.param == "messages[0].content[1]"
    assert not web.pipeline.works


async def test_media_must_be_enabled(open_site):
    async with open_site(enable_multimodal=False) as web:
        reply = await web.chat([picture()])
        assert (reply.status, reply.code) == (400, "media_disabled")
        assert "--enable-multimodal" in reply.json["error"]["message"]


async def test_too_many_media(open_site):
    async with open_site(Limits(media_items=2)) as web:
        assert (await web.chat([picture("AAAA")] * 2)).status == 200
        reply = await web.chat([picture("AAAA")] * 3)
        assert (reply.status, reply.code) == (400, "too_many_media")


@pytest.mark.parametrize("kind", ["video", "audio", "file", "nonsense", None, 3])
async def test_other_parts_are_named(web, kind):
    part = {"type": kind, "x": 1}
    reply = await web.chat([{"type": "text", "text": "a"}, part])
    assert (reply.status, reply.code) == (400, "invalid_value")
    assert reply.param == "messages[0].content[1]"


@pytest.mark.parametrize("detail", ["auto", "low", "high", "original", None])
async def test_detail_is_taken(web, detail):
    assert (await web.chat([picture(detail=detail)])).status == 200


async def test_an_unknown_detail_is_refused(web):
    reply = await web.chat([picture(detail="finest")])
    assert (reply.status, reply.code) == (400, "invalid_value")
    assert reply.param == "messages[0].content[0].image_url.detail"


@pytest.mark.parametrize(
    ("fields", "code", "param"),
    [
        ({"messages": [{"role": "tool", "content": "a"}]}, "invalid_value", "messages[0].role"),
        ({"messages": [{"role": "king", "content": "a"}]}, "invalid_value", "messages[0].role"),
        ({"stop": ""}, "invalid_value", "stop"),
        ({"stop": ["a"] * 17}, "invalid_value", "stop"),
        ({"stop": ["a", ""]}, "invalid_value", "stop[1]"),
        ({"stream_options": {"include_usage": True}}, "invalid_value", "stream_options"),
        ({"top_logprobs": 3}, "invalid_value", "top_logprobs"),
        ({"max_tokens": 3, "min_tokens": 4}, "invalid_value", "min_tokens"),
        ({"response_format": {"type": "xml"}}, "invalid_value", "response_format.type"),
        ({"guided_regex": "a", "allowed_token_ids": [1]}, "invalid_value", "allowed_token_ids"),
        ({"top_p": 0}, "invalid_value", "top_p"),
        ({"temperature": -1}, "invalid_value", "temperature"),
        ({"temperature": "hot"}, "invalid_value", "temperature"),
    ],
)
async def test_what_is_refused(web, fields, code, param):
    reply = await web.chat(**fields)
    assert (reply.status, reply.code, reply.param) == (400, code, param)
    assert "`" not in reply.json["error"]["message"]


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"n": "x"}, "'n' must be an integer, not a string."),
        ({"n": 0}, "'n' must be an integer >= 1."),
        ({"stop": 3}, "'stop' must be a string or a list, not an integer."),
        ({"stream": 1}, "'stream' must be a boolean, not an integer."),
        ({"logit_bias": {"a": 1}}, "A key of 'logit_bias' must be an integer, not a string."),
        ({"logit_bias": {"1": 200}}, "A value of 'logit_bias' must be a number <= 100.0."),
        ({"messages": []}, "'messages' must be a list of length >= 1."),
        (
            {"messages": [{"role": "tool", "content": "a"}]},
            "The model's chat template has no place for results of tools.",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "film"}]}]},
            "The type of 'messages[0].content[0]' must be text, input_text, image_url, "
            "input_image, video_url, audio_url, input_audio, image_embeds, video_embeds, "
            "audio_embeds, file, input_file.",
        ),
    ],
)
async def test_what_is_said_of_it(web, fields, said):
    assert (await web.chat(**fields)).json["error"]["message"] == said


async def test_media_that_workers_refuse_are_named_as_the_client_counts(web):
    text = {"type": "text", "text": "a"}
    messages = [
        {"role": "user", "content": [picture("AAAA"), text]},
        {"role": "assistant", "content": "Hm"},
        {"role": "user", "content": [text, picture("AAAA"), picture("AAAA")]},
    ]
    for item, param in ((0, "messages[0].content[0]"), (2, "messages[2].content[2]")):
        web.pipeline.error = errors.InvalidMedia("no picture", param=f"media[{item}]")
        for n in (1, 2):
            reply = await web.chat(messages=messages, n=n)
            assert (reply.status, reply.code, reply.param) == (400, "invalid_media", param)


async def test_context_errors_name_what_is_too_long(web):
    long = "a b " * 150_000
    reply = await web.chat(long)
    assert (reply.code, reply.param) == ("context_length_exceeded", "messages")
    reply = await web.ask("/v1/completions", {"model": "tiny", "prompt": long})
    assert (reply.code, reply.param) == ("context_length_exceeded", "prompt")
    context = (await web.ask("/v1/models/tiny")).json["max_model_len"]
    reply = await web.ask("/v1/completions", {"model": "tiny", "prompt": [5] * context})
    assert (reply.code, reply.param) == ("context_length_exceeded", "prompt")
    assert "max_tokens" not in reply.json["error"]["message"]
    web.pipeline.error = errors.ContextLengthExceeded.of(9, 5, 12)
    reply = await web.ask("/v1/completions", {"model": "tiny", "prompt": "a"})
    assert reply.param == "prompt"
    assert "max_tokens is 5" in reply.json["error"]["message"]


# --- errors


async def test_errors_before_the_first_token_have_their_status(web):
    web.pipeline.error = errors.NoWorkers("no P worker at 127.0.0.1:9 under /dev/shm/x")
    for stream in (False, True):
        reply = await web.chat(stream=stream)
        assert (reply.status, reply.code) == (503, "no_workers")
        assert reply.json["error"]["type"] == "server_error"
        assert reply.headers["retry-after"]
        assert b"/dev/shm" not in reply.body
    web.pipeline.error = errors.NatsAway("NATS at 127.0.0.1:9 is away")
    reply = await web.chat()
    assert (reply.status, reply.code) == (503, "nats_away")
    assert "NATS, through which workers are called, is away" in reply.json["error"]["message"]
    assert b"127.0.0.1" not in reply.body


async def test_errors_in_mid_stream_end_it_without_done(web):
    web.pipeline.error = errors.EngineFailed("CUDA error at /usr/lib/x.so")
    web.pipeline.fail_after = 3
    events = (await web.chat(stream=True)).events
    assert events[-1]["error"]["code"] == "engine_failed"
    assert "[DONE]" not in events
    assert "/usr" not in json.dumps(events)


async def test_bugs_show_no_details_to_clients(web, caplog):
    web.pipeline.error = KeyError("/secret/path")
    reply = await web.chat()
    assert (reply.status, reply.code) == (500, "internal_error")
    assert b"secret" not in reply.body
    assert "/secret/path" in caplog.text
    assert caplog.records[-1].request_id == reply.headers["x-request-id"]
    web.pipeline.error = None
    assert (await web.chat()).status == 200


async def test_every_answer_has_an_id(web, caplog):
    replies = [
        await web.chat(),
        await web.chat(stream=True),
        await web.chat(n=0),
        await web.ask("/nothing"),
        await web.ask("/health"),
        await web.ask("/health", b"", "POST"),
        await web.raw(b"nonsense\r\n\r\n"),
    ]
    web.pipeline.error = errors.WorkerLost("gone")
    failed = await web.chat()
    ids = [reply.headers["x-request-id"] for reply in [*replies, failed]]
    assert len(set(ids)) == len(ids)
    assert ids[-1] == caplog.records[-1].request_id


@pytest.mark.parametrize("id", [-1, 1 << 31, 1 << 40, 1 << 70])
@pytest.mark.parametrize("stream", [False, True])
async def test_ids_that_are_not_tokens_show_nothing(web, id, stream):
    web.pipeline.ids = [*web.pipeline.ids, id]
    fields = {"logprobs": True, "top_logprobs": 1, "return_token_ids": True, "stream": stream}
    reply = await web.chat(**fields)
    assert reply.status == 200
    if stream:
        deltas = [event["choices"][0]["delta"] for event in reply.events[:-1]]
        assert "".join(delta.get("content", "") for delta in deltas) == TEXT
    else:
        (choice,) = reply.json["choices"]
        assert choice["message"]["content"] == TEXT
        assert choice["logprobs"]["content"][-1]["bytes"] == []
    body = {"model": "tiny", "prompt": "a", "logprobs": 1}
    assert (await web.ask("/v1/completions", body)).status == 200


async def test_run_without_an_end_is_a_failure(web):
    async def run(work, deliver, flow=None):
        return {}

    web.pipeline.run = run
    assert (await web.chat()).code == "engine_failed"


async def test_overload(open_site):
    async with open_site(Limits(requests=2)) as web:
        web.pipeline.gate = asyncio.Event()
        held = [asyncio.ensure_future(web.chat()) for _ in range(2)]
        while len(web.pipeline.works) < 2:
            await asyncio.sleep(0.001)
        reply = await web.chat()
        assert (reply.status, reply.code) == (429, "server_overloaded")
        assert reply.headers["retry-after"]
        web.pipeline.gate.set()
        assert [r.status for r in await asyncio.gather(*held)] == [200, 200]
        assert (await web.chat()).status == 200


# --- the smaller routes


async def test_health(web):
    reply = await web.ask("/health")
    assert (reply.status, reply.json) == (200, {"status": "ok"})
    web.pipeline.absent = ("P", "D")
    reply = await web.ask("/health")
    assert (reply.status, reply.json["missing"]) == (503, ["P", "D"])
    assert (await web.ask("/live")).status == 200


async def test_models(web):
    (model,) = (await web.ask("/v1/models")).json["data"]
    assert model["id"] == "tiny"
    assert (await web.ask("/v1/models/tiny")).json == model
    reply = await web.ask("/v1/models/other")
    assert (reply.status, reply.code, reply.param) == (404, "model_not_found", "model")
    assert (await web.ask("/v1/models/tiny", {})).status == 405
    text = (await web.ask("/metrics")).body.decode()
    assert 'triptych_requests_total{route="/v1/models/{model}",status="404"} 1.0' in text


async def test_model_names_with_slashes(open_site):
    async with open_site(served_model_name="org/tiny v1") as web:
        for path in ("org/tiny%20v1", "org%2Ftiny%20v1"):
            assert (await web.ask(f"/v1/models/{path}")).json["id"] == "org/tiny v1"


async def test_cluster(web):
    web.pipeline.tensor_bytes = 17
    answer = (await web.ask("/cluster")).json
    assert answer["topology"] == "EPD"
    place = {"place": "nats://n:4222", "namespace": "default", "away": True}
    assert answer["discovery"] == place
    (worker,) = answer["workers"]
    assert worker["endpoint"] == "triptych://default.EPD-0.generate"
    [unused] = answer["unused"]
    assert (unused["id"], unused["why"]) == ("E-0", "It serves another model.")
    assert worker["parameters"] == {"encoder": 1, "language": 2}
    assert worker["bytes_sent"] == {"shm": 5}
    assert (worker["host"], worker["address"]) == ("gpu-1", "10.0.0.1:1")
    assert (worker["request_plane"], worker["event_plane"]) == ("tcp", "zmq")
    assert worker["device"] == "cuda:1"
    assert answer["frontend"]["tensor_bytes"] == 17
    routing = {"by": "least-loaded", "lookups": 4.0, "indexed_blocks": 2.0}
    assert answer["frontend"]["routing"] == routing
    text = (await web.ask("/metrics")).body.decode()
    assert "triptych_routing_lookups_total 4.0" in text
    assert "triptych_routing_indexed_blocks 2.0" in text
    where = 'event_plane="zmq",host="gpu-1",request_plane="tcp",role="EPD",worker="EPD-0"'
    assert f"triptych_worker_info{{{where}}} 1.0" in text


async def test_the_namespace_of_a_run_directory_is_that_of_its_endpoints(web):
    """Discovery itself knows none. Proved by showing its own."""
    web.pipeline.discovery_status = DiscoveryStatus("/run/triptych", False)
    answer = (await web.ask("/cluster")).json
    place = {"place": "/run/triptych", "namespace": "default", "away": False}
    assert answer["discovery"] == place
    [worker] = answer["workers"]
    assert worker["endpoint"] == "triptych://default.EPD-0.generate"


async def test_no_more_is_tokenized_than_fits(web):
    """Millions of ids would hold up everybody else's answers."""
    reply = await web.ask("/tokenize", {"prompt": "word " * 400_000})
    assert (reply.status, reply.code) == (400, "context_length_exceeded")
    assert reply.json["error"]["param"] == "prompt"


async def test_tokenize_and_back(web):
    answer = (await web.ask("/tokenize", {"prompt": TEXT})).json
    assert answer["count"] == len(answer["tokens"])
    back = (await web.ask("/detokenize", {"tokens": answer["tokens"]})).json
    assert back["prompt"] == TEXT
    chat = (await web.ask("/tokenize", {"messages": [{"role": "user", "content": "Hi"}]})).json
    await web.chat("Hi")
    assert chat["tokens"] == list(web.pipeline.works[0].prompt)
    for body in ({}, {"prompt": "a", "messages": []}):
        assert (await web.ask("/tokenize", body)).code == "invalid_value"


async def test_f28_metrics_count_every_warning_that_is_limited(web):
    """Proved with the totals of connections alone."""
    RateLimitedLog(logging.getLogger(__name__), "records_rejected").warning("records_rejected", "x")
    text = (await web.ask("/metrics")).body.decode()
    [count] = re.findall("^triptych_connections_records_rejected_total (.*)$", text, re.M)
    assert float(count) >= 1


async def test_metrics(web):
    await web.chat(max_tokens=3)
    await web.ask("/nothing")
    text = (await web.ask("/metrics")).body.decode()
    assert 'triptych_requests_total{route="/v1/chat/completions",status="200"} 1.0' in text
    assert 'triptych_requests_total{route="-",status="404"} 1.0' in text
    assert "triptych_output_tokens_total 3.0" in text
    assert "triptych_first_token_seconds_count 1.0" in text
    assert "triptych_between_tokens_seconds_count 2.0" in text
    assert 'triptych_worker_kv_blocks_free{role="EPD",worker="EPD-0"} 7.0' in text
    assert 'direction="sent"' in text


# --- the official client


@pytest.fixture
async def client(web):
    url = f"http://127.0.0.1:{web.server.port}/v1"
    async with openai.AsyncOpenAI(base_url=url, api_key="x", max_retries=0) as running:
        yield running


async def test_client_chat(client):
    answer = await client.chat.completions.create(model="tiny", messages=HI, n=2, seed=3)
    assert [choice.message.content for choice in answer.choices] == [TEXT, TEXT]
    assert answer.usage.total_tokens > 0
    again = [*HI, answer.choices[0].message, *HI]
    assert (await client.chat.completions.create(model="tiny", messages=again)).choices


async def test_client_stream(client):
    stream = await client.chat.completions.create(
        model="tiny", messages=HI, stream=True, stream_options={"include_usage": True}
    )
    chunks = [chunk async for chunk in stream]
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == TEXT
    assert chunks[-1].usage.completion_tokens > 0


async def test_client_logprobs(client):
    answer = await client.chat.completions.create(
        model="tiny", messages=HI, logprobs=True, top_logprobs=2
    )
    token = answer.choices[0].logprobs.content[0]
    assert math.isclose(token.logprob, -0.5)
    assert len(token.top_logprobs) == 2


async def test_client_images(client, web):
    content = [{"type": "text", "text": "What?"}, picture()]
    messages = [{"role": "user", "content": content}]
    answer = await client.chat.completions.create(model="tiny", messages=messages)
    assert answer.choices[0].message.content == TEXT
    assert len(web.pipeline.works[0].media) == 1


async def test_client_completion_and_models(client, web):
    answer = await client.completions.create(
        model="tiny", prompt="Once", logprobs=2, max_tokens=len(web.pipeline.ids)
    )
    assert answer.choices[0].text == TEXT
    assert [model.id async for model in client.models.list()] == ["tiny"]
    assert (await client.models.retrieve("tiny")).id == "tiny"
    with pytest.raises(openai.NotFoundError):
        await client.models.retrieve("other")


async def test_client_errors(client, web):
    create = client.chat.completions.create
    with pytest.raises(openai.BadRequestError) as bad:
        await create(model="tiny", messages=HI, extra_body={"chat_template": "x"})
    assert (bad.value.code, bad.value.param) == ("unsupported_parameter", "chat_template")
    with pytest.raises(openai.NotFoundError):
        await create(model="other", messages=HI)
    web.pipeline.error = errors.NoWorkers("")
    with pytest.raises(openai.InternalServerError):
        await create(model="tiny", messages=HI)
    web.pipeline.error = errors.Overloaded("")
    with pytest.raises(openai.RateLimitError):
        await create(model="tiny", messages=HI)
    web.pipeline.error, web.pipeline.fail_after = errors.WorkerLost(""), 2
    stream = await create(model="tiny", messages=HI, stream=True)
    with pytest.raises(openai.APIError, match="lost"):
        [chunk async for chunk in stream]


async def test_client_key(open_site):
    async with open_site(api_key="secret") as web:
        url = f"http://127.0.0.1:{web.server.port}/v1"
        async with openai.AsyncOpenAI(base_url=url, api_key="secret") as client:
            assert (await client.chat.completions.create(model="tiny", messages=HI)).choices
        async with openai.AsyncOpenAI(base_url=url, api_key="guess") as client:
            with pytest.raises(openai.AuthenticationError):
                await client.chat.completions.create(model="tiny", messages=HI)


async def test_a_large_body_is_freed_while_its_request_runs(web, monkeypatch):
    bodies = []

    def decode(body, *more):
        bodies.append(weakref.ref(body))
        return decode_request(body, *more)

    monkeypatch.setattr(app, "decode_request", decode)
    web.pipeline.gate = asyncio.Event()
    message = json.dumps({"model": "tiny", "messages": HI}).encode()
    asked = asyncio.create_task(web.ask("/v1/chat/completions", b" " * (3 << 20) + message))
    async with asyncio.timeout(30):
        while not web.pipeline.works:
            await asyncio.sleep(0.01)
    assert [body() for body in bodies] == [None]
    web.pipeline.gate.set()
    assert (await asked).status == 200
