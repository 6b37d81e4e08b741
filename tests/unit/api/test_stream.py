"""Streams as bytes: a head, then chunks, then their end, whatever the first delta shows."""

import json

import pytest

from support.strict_client import Responses
from triptych.messages import Delta, PromptInfo

PATHS = ["/v1/completions", "/v1/chat/completions"]


def first_token(web, kind):
    """Let the engine begin with a token of which nothing can be shown yet."""
    encode = web.pipeline.tokenizer.library.encode
    text = encode("Hello there").ids
    if kind == "special":
        web.pipeline.ids = [web.pipeline.tokenizer.specials["<|im_end|>"], *text]
        return {}
    if kind == "half":
        whole = encode("🎉").ids
        assert len(whole) > 1
        web.pipeline.ids = [*whole, *text]
        return {}
    web.pipeline.ids = text
    return {"stop": [web.pipeline.tokenizer.library.decode(text[:1]) + "Z"]}


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("kind", ["withheld", "half", "special"])
@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("ids", [False, True])
@pytest.mark.parametrize("most", [1, 6])
async def test_b49_the_head_comes_before_any_chunk(web, wire, path, kind, n, ids, most):
    """Off: the quick way to write is used before a head was written."""
    request, _ = wire
    asked = {"model": "tiny", "stream": True, "max_tokens": most, "n": n, "return_token_ids": ids}
    asked |= first_token(web, kind)
    asked |= {"prompt": "Hi"} if "chat" not in path else {
        "messages": [{"role": "user", "content": "Hi"}]
    }  # fmt: skip
    whole = await web.ask(path, asked | {"stream": False})
    reader, writer = await web.connect()
    writer.write(request("POST", path, json.dumps(asked).encode(), {"Connection": "close"}))
    responses = Responses()
    responses.expect("POST")
    while data := await reader.read(1 << 16):
        responses.feed(data)
    responses.end()
    (response,) = responses.take()
    assert response.status == 200
    stream = response.stream()
    for choice in whole.json["choices"]:
        index = choice["index"]
        text = choice["text"] if "text" in choice else choice["message"]["content"]
        assert stream.texts.get(index, "") == text
        assert stream.finishes[index] == choice["finish_reason"]
        assert stream.ids.get(index, []) == choice.get("token_ids", [])
    if ids:
        assert stream.prompt_ids
    writer.close()


@pytest.mark.parametrize("path", PATHS)
async def test_prompt_ids_come_even_without_a_token(web, path, monkeypatch):
    """A stream of nothing but its finish."""

    async def nothing(work, deliver):
        deliver(Delta((), "stop", (), PromptInfo(len(work.prompt), 0, work.prompt)))
        return {}

    monkeypatch.setattr(web.pipeline, "_tokens", nothing)
    asked = {"model": "tiny", "stream": True, "return_token_ids": True}
    asked |= {"prompt": "Hi", "messages": [{"role": "user", "content": "Hi"}]}
    del asked["messages" if path == PATHS[0] else "prompt"]
    events = (await web.ask(path, asked)).events
    assert len([e for e in events[:-1] if e.get("prompt_token_ids")]) == 1
    assert events[-2]["choices"][0]["finish_reason"] == "stop"
