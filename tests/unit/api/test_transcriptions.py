"""/v1/audio/transcriptions: a form to a chat of one turn, and its answer as a transcript."""

import json

import openai
import pytest

from support.forms import form
from triptych.api.requests import TRANSCRIBE
from triptych.checkpoint import packaged_folder
from triptych.config import Limits

PATH = "/v1/audio/transcriptions"
OMNI = str(packaged_folder("qwen_omni"))
SOUND = bytes(range(256)) * 8


@pytest.fixture
async def omni(open_site):
    async with open_site(model=OMNI) as running:
        yield running


async def ask(web, *fields, file=SOUND):
    headers, body = form([("file", file), ("model", "tiny"), *fields])
    return await web.ask(PATH, body, "POST", headers)


def prompt_text(web):
    (work,) = web.pipeline.works
    return web.pipeline.tokenizer.library.decode(work.prompt, skip_special_tokens=False)


async def test_a_sound_becomes_a_chat_and_its_answer_the_text(omni):
    reply = await ask(omni)
    assert reply.status == 200
    assert set(reply.json) == {"text", "usage"}
    assert reply.json["text"] == "Hello there, wörld! 🎉 done"
    usage = reply.json["usage"]
    assert usage["type"] == "tokens"
    assert usage["total_tokens"] == usage["input_tokens"] + usage["output_tokens"]
    (work,) = omni.pipeline.works
    (item,) = work.media
    assert (item.kind, bytes(item.data), work.sampling.temperature) == ("audio", SOUND, 0.0)
    assert TRANSCRIBE in prompt_text(omni)


async def test_fields_reach_the_chat(omni):
    reply = await ask(
        omni,
        ("prompt", "Write <|im_end|> down."),
        ("language", "de"),
        ("temperature", "0.5"),
        ("seed", "7"),
        ("max_completion_tokens", "9"),
        ("response_format", "text"),
        ("stream", "false"),
    )
    assert reply.headers["content-type"].startswith("text/plain")
    assert reply.body.decode() == "Hello there, wör"
    sampling = omni.pipeline.works[0].sampling
    assert (sampling.temperature, sampling.seed, sampling.max_tokens) == (0.5, 7, 9)
    assert "down. The language is de." in prompt_text(omni)
    assert TRANSCRIBE not in prompt_text(omni)


@pytest.mark.parametrize(
    ("field", "code"),
    [
        (("stream", "true"), "unsupported_parameter"),
        (("timestamp_granularities[]", "word"), "unsupported_parameter"),
        (("response_format", "srt"), "invalid_value"),
        (("response_format", "verbose_json"), "invalid_value"),
        (("temperature", "hot"), "invalid_value"),
        (("temperature", "nan"), "invalid_value"),
        (("temperature", "-1"), "invalid_value"),
        (("seed", "x"), "invalid_value"),
        (("max_completion_tokens", "0"), "invalid_value"),
        (("language", ""), "invalid_value"),
        (("colour", "red"), "unsupported_parameter"),
        (("model", "tiny"), "invalid_form"),
    ],
)
async def test_b56_fields_that_are_refused_by_name(omni, field, code):
    reply = await ask(omni, field)
    assert (reply.status, reply.code, reply.param) == (400, code, field[0]), reply.body
    assert omni.pipeline.works == []


async def test_a_format_with_times_is_refused_in_words(omni):
    reply = await ask(omni, ("response_format", "verbose_json"))
    assert reply.json["error"]["message"] == "'response_format' must be json or text."


async def test_b56_other_refusals(omni, web, open_site):
    for headers, body in (
        form([("model", "tiny")]),
        form([("file", b""), ("model", "tiny")]),
        form([("file", b"a"), ("other", b"b"), ("model", "tiny")]),
        ({"Content-Type": "application/json"}, b"{}"),
        ({}, b""),
    ):
        reply = await omni.ask(PATH, body, "POST", headers)
        assert (reply.status, reply.code) == (400, "invalid_form"), reply.body
    headers, body = form([("file", b"a")])
    reply = await omni.ask(PATH, body, "POST", headers)
    assert (reply.code, reply.param) == ("invalid_value", "model")
    headers, body = form([("file", b"a"), ("model", "other")])
    assert (await omni.ask(PATH, body, "POST", headers)).code == "model_not_found"
    reply = await ask(web)  # a model that does not hear
    assert (reply.status, reply.code, reply.param) == (400, "invalid_value", "file")
    async with open_site(model=OMNI, enable_multimodal=False) as deaf:
        assert (await ask(deaf)).code == "media_disabled"


async def test_the_limits_on_media_hold(open_site):
    for fields in ({"limit_media": "audio=0"}, {"limits": Limits(media_items=0)}):
        async with open_site(model=OMNI, **fields) as web:
            reply = await ask(web)
            assert (reply.status, reply.code, reply.param) == (400, "too_many_media", "file")
            assert web.pipeline.works == []


async def test_a_large_form_is_read_in_a_thread(open_site):
    async with open_site(Limits(), model=OMNI) as web:
        assert (await ask(web, file=SOUND * 1000)).status == 200
        assert bytes(web.pipeline.works[0].media[0].data) == SOUND * 1000


async def test_the_client_of_openai(omni):
    async with openai.AsyncOpenAI(
        base_url=f"http://127.0.0.1:{omni.server.port}/v1", api_key="x", max_retries=0
    ) as client:
        heard = await client.audio.transcriptions.create(model="tiny", file=("a.wav", SOUND))
        assert heard.text == "Hello there, wörld! 🎉 done"
        assert heard.usage.total_tokens > 0
        text = await client.audio.transcriptions.create(
            model="tiny", file=("a.wav", SOUND), response_format="text", language="en"
        )
        assert text.strip() == heard.text
        with pytest.raises(openai.BadRequestError) as refused:
            await client.audio.transcriptions.create(
                model="tiny", file=("a.wav", SOUND), stream=True
            )
    assert json.loads(refused.value.response.content)["error"]["param"] == "stream"


async def test_media_are_uploaded_as_a_form(omni):
    headers, body = form([("file", SOUND)])
    reply = await omni.ask("/v1/media", body, "POST", headers)
    assert (reply.status, reply.json["bytes"]) == (200, len(SOUND))
    part = {"type": "audio_url", "audio_url": {"url": reply.json["id"]}}
    assert (await omni.chat([part])).status == 200
    assert bytes(omni.pipeline.works[0].media[0].data) == SOUND
    headers, body = form([("file", SOUND), ("purpose", "vision")])
    reply = await omni.ask("/v1/media", body, "POST", headers)
    assert (reply.code, reply.param) == ("unsupported_parameter", "purpose")
