"""Media options of a request, and transcripts, are the same in every pattern, cold, cached and
decoded beside the frontend; caches of requests with options do not touch those without."""

import asyncio
import base64
from functools import cache

import aiohttp
import openai
import pytest
from tools import tiny

from support import clips, pictures
from support.one_process import serving_in_one_process

FLAGS = ("--enable-multimodal", "--torch-kv-blocks=3000", "--decode-processes=1")
SERVERS = [("EPD",), ("E/PD",), ("E/P/D",), ("EP/D",), ("E/P/D", "--decode-at=frontend")]
OPTIONS = [
    {},
    {"media_io_kwargs": {"video": {"num_frames": 6}}},
    {"mm_processor_kwargs": {"fps": 4.0}},
    {"mm_processor_kwargs": {"use_audio_in_video": False}},
    {"mm_processor_kwargs": {"min_pixels": 784, "max_pixels": 3136}},
]

pytestmark = pytest.mark.timeout(600)


def data_url(kind, data):
    return {"type": f"{kind}_url", f"{kind}_url": {"url": data}}


def base64_of(data):
    return base64.b64encode(data).decode()


def bodies():
    clip = clips.video(3, frames=50, width=96, height=64, sound=1.0)
    film = data_url("video", f"data:video/mp4;base64,{base64_of(clip)}")
    picture = pictures.encoded(pictures.draw(1, 700, 500), "JPEG")
    image = {"url": f"data:image;base64,{base64_of(picture)}"}
    frames = [pictures.encoded(pictures.draw(n, 64, 48), "JPEG") for n in range(5)]
    listed = data_url("video", "data:video/jpeg;base64," + ",".join(map(base64_of, frames)))
    text = {"type": "text", "text": "What is it?"}
    contents = [([film, text], options) for options in OPTIONS]
    contents += [
        ([{"type": "image_url", "image_url": image | {"detail": detail}}, text], {})
        for detail in ("high", "low")
    ]
    contents += [([listed, text], {})]
    common = {"max_tokens": 5, "temperature": 0, "return_token_ids": True}
    return [
        {"messages": [{"role": "user", "content": content}], **common, **options}
        for content, options in contents
    ]


@cache
def answers(*flags):
    pattern, *rest = flags
    folder = str(tiny.ensure_checkpoint("qwen2_5_omni"))
    with serving_in_one_process(folder, "--pattern", pattern, *FLAGS, *rest) as server:
        rounds = [asyncio.run(ask_all(server)) for _ in range(2)]
        too_large = bodies()[0] | {"mm_processor_kwargs": {"max_pixels": 10**9}}
        [(status, refusal)] = asyncio.run(ask_all(server, [too_large]))
        return rounds, status, refusal["error"], transcribe(server)


def transcribe(server):
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="x", max_retries=0) as client:
        heard = client.audio.transcriptions.create(
            model=server.model,
            file=("a.wav", clips.sound(1)),
            extra_body={"max_completion_tokens": 5},
        )
    assert heard.usage.output_tokens <= 5
    return heard.text


async def ask_all(server, asked=None):
    """Status and answer of each, all at once."""
    async with aiohttp.ClientSession() as session:

        async def ask(body):
            body = body | {"model": server.model}
            async with session.post(f"{server.url}/v1/chat/completions", json=body) as got:
                return got.status, await got.json()

        return await asyncio.gather(*map(ask, asked or bodies()))


@pytest.mark.parametrize("flags", SERVERS, ids=" ".join)
def test_tokens_with_options_are_equal_in_every_pattern(flags):
    rounds, status, error, transcript = answers(*flags)
    (wanted, _), _, _, text = answers("EPD")
    for got in rounds:
        for (code, answer), (_, want) in zip(got, wanted, strict=True):
            assert code == 200, answer
            assert answer["prompt_token_ids"] == want["prompt_token_ids"]
            assert answer["choices"][0]["token_ids"] == want["choices"][0]["token_ids"]
    assert transcript == text
    assert (status, error["code"], error["param"]) == (400, "invalid_value", "max_pixels")


def test_options_matter():
    (first, _), _, _, text = answers("EPD")
    assert text
    lengths = [answer["usage"]["prompt_tokens"] for _, answer in first]
    plain, six, fast, silent, small, high, low, _ = lengths
    assert len({plain, six, fast, silent, small}) == 5
    assert six > plain
    assert fast > six
    assert silent < plain
    assert low == high  # this model's own limit is below that of low detail
