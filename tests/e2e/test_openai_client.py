"""The official client against a real server, apart in three processes."""

import base64
import random

import openai
import pytest
from tools import tiny

from support.requests64 import picture, png
from support.servers import serving

KEY = "sesame-open"


@pytest.fixture(scope="module")
def client():
    flags = ["--pattern=E/P/D", "--enable-multimodal", "--served-model-name=panel"]
    with (
        serving(
            str(tiny.ensure_checkpoint("qwen2_5_vl")), *flags, env={"TRIPTYCH_API_KEY": KEY}
        ) as server,
        openai.OpenAI(base_url=f"{server.url}/v1", api_key=KEY, max_retries=0) as client,
    ):
        client.server = server
        yield client


def content(seed=0):
    data = base64.b64encode(png(picture(random.Random(seed)))).decode()
    return [
        {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{data}"}},
        {"type": "text", "text": "What do you see?"},
    ]


def ask(client, what, **fields):
    messages = [{"role": "user", "content": what}]
    fields = {"max_tokens": 12, "temperature": 0} | fields
    return client.chat.completions.create(model="panel", messages=messages, **fields)


def test_models(client):
    assert [model.id for model in client.models.list()] == ["panel"]


def test_chat(client):
    answer = ask(client, "Hello")
    assert answer.choices[0].message.role == "assistant"
    assert answer.choices[0].message.content
    assert answer.choices[0].finish_reason in {"stop", "length"}
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens
    assert answer.usage.completion_tokens <= 12


def test_a_stream_says_the_same(client):
    whole = ask(client, content())
    chunks = list(ask(client, content(), stream=True, stream_options={"include_usage": True}))
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == whole.choices[0].message.content
    assert chunks[0].choices[0].delta.role == "assistant"
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == (
        whole.choices[0].finish_reason
    )
    assert chunks[-1].usage == whole.usage or (
        chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
    )


def test_images_matter(client):
    texts = {ask(client, content(seed)).choices[0].message.content for seed in range(4)}
    assert len(texts) == 4


def test_logprobs(client):
    answer = ask(client, content(), logprobs=True, top_logprobs=3)
    tokens = answer.choices[0].logprobs.content
    assert len(tokens) == answer.usage.completion_tokens
    for token in tokens:
        assert token.logprob <= 0
        assert len(token.top_logprobs) == 3
        assert token.top_logprobs[0].logprob == pytest.approx(token.logprob)  # greedy: the best
        assert bytes(token.bytes).decode(errors="replace") == token.token


def test_n_and_seed(client):
    def texts(**fields):
        answer = ask(client, content(), temperature=1.0, **fields)
        return [choice.message.content for choice in answer.choices]

    three = texts(n=3, seed=5)
    assert len(set(three)) == 3
    assert texts(n=3, seed=5) == three
    assert texts(seed=5) == three[:1]
    assert texts(seed=6) != three[:1]


def test_completions(client):
    answer = client.completions.create(model="panel", prompt="Once upon", max_tokens=5, logprobs=2)
    assert answer.choices[0].text
    assert len(answer.choices[0].logprobs.tokens) == answer.usage.completion_tokens


def test_errors_are_its_exceptions(client):
    with pytest.raises(openai.NotFoundError) as error:
        client.chat.completions.create(model="no", messages=[{"role": "user", "content": "?"}])
    assert error.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as error:
        ask(client, "?", extra_body={"colour": "red"})
    assert (error.value.code, error.value.param) == ("unsupported_parameter", "colour")
    with pytest.raises(openai.BadRequestError) as error:
        ask(client, [{"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}])
    assert error.value.code == "invalid_media"
    with pytest.raises(openai.AuthenticationError) as error:
        ask(client.with_options(api_key="wrong"), "?")
    assert error.value.code == "invalid_api_key"


def test_the_client_can_hang_up(client):
    stream = ask(client, content(), max_tokens=3000, stream=True, extra_body={"ignore_eos": True})
    next(iter(stream))
    stream.close()
    assert ask(client, "Still there?").choices[0].message.content
