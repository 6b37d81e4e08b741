"""Scripted replies of the fake engine."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from triptych.checkpoint import open_model, packaged_folder
from triptych.config import Config, FakeSettings
from triptych.engines.base import Generation, find_engine
from triptych.engines.fake.replies import ReplyScript
from triptych.errors import InvalidConfig
from triptych.messages import Sampling, Work
from triptych.topology import Role
from triptych.transfer.base import Array

MODEL = packaged_folder("qwen")
SCRIPT = [
    {"prompt": "<|im_start|>weather", "reply": "first"},
    {"prompt": "weather", "reply": "Sunny. 🎉"},
    {"prompt": "letters", "reply": "a<|im_end|>é", "split": True},
    {"prompt": "empty", "reply": ""},
    {"prompt": "long", "reply": "word " * 400},
]


@pytest.fixture
def script(tmp_path: Path) -> Path:
    file = tmp_path / "replies.jsonl"
    file.write_text("\n".join(json.dumps(line) for line in SCRIPT))
    return file


def work(script: ReplyScript, text: str, generated: tuple[int, ...] = (), **sampling) -> Work:
    prompt = tuple(script._library.encode(text).ids)
    return Work("w", prompt, (), Sampling(**{"seed": 1, **sampling}), generated=generated)


def test_the_first_line_that_fits_gives_the_reply(script: Path):
    replies = ReplyScript(open_model(MODEL), str(script))
    decode = replies._library.decode
    end = open_model(MODEL).end_ids[0]
    for prompt, reply in (
        ("<|im_start|>weather", "first"),
        ("How is the weather?", "Sunny. 🎉"),
        ("letters", "a<|im_end|>é"),
    ):
        ids = replies.find(work(replies, prompt))
        assert ids is not None
        assert decode(ids[:-1]) == reply
        assert ids[-1] == end
    assert len(replies.find(work(replies, "letters")) or ()) > len("a<|im_end|>é")
    assert replies.find(work(replies, "empty")) == (end,)
    assert replies.find(work(replies, "Hi")) is None


async def test_the_engine_says_it(script: Path):
    settings = FakeSettings(replies=str(script))
    loaded = find_engine("fake")(
        Config(model=str(MODEL), engine="fake", fake=settings), Role("EPD"), empty, lambda *_: None
    )
    replies = ReplyScript(open_model(MODEL), str(script))

    async def said(prompt, generated=(), **sampling):
        out = []
        asked = work(replies, prompt, generated, **sampling)
        await loaded.engine.generate(Generation(asked, "PD", ()), out.append)
        return tuple(id for delta in out for id in delta.ids), out[-1].finish

    whole = replies.find(work(replies, "weather"))
    assert await said("weather") == (whole, "stop")
    assert await said("weather", seed=9) == (whole, "stop")
    assert await said("weather", max_tokens=2) == (whole[:2], "length")
    assert await said("weather", stop_token_ids=whole[1:2]) == (whole[:2], "stop")
    assert await said("weather", generated=whole[:2]) == (whole[2:], "stop")
    ids, finish = await said("long")
    assert (len(ids) > 400, finish) == (True, "stop")
    assert (await said("Hi", max_tokens=5))[1] == "length"
    loaded.close()


def empty(dtype: str, shape: tuple[int, ...]) -> Array:
    raise AssertionError("nothing is handed over")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("nothing", "line 2 is not JSON"),
        ('{"prompt": "\udcff"}', "line 2 is not JSON"),
        ("[1]", "line 2 is not an object"),
        ('{"prompt": "a"}', "line 2 has no 'reply'"),
        ('{"prompt": "a", "answer": "b"}', "line 2 has an unknown 'answer'"),
        ('{"prompt": "a", "reply": 1}', "line 2 has a wrong 'reply'"),
    ],
)
def test_a_bad_file_is_named_with_its_line(tmp_path: Path, text: str, said: str):
    file = tmp_path / "replies.jsonl"
    with pytest.raises(InvalidConfig, match=r"--fake-replies .* cannot be read: No such file"):
        ReplyScript(open_model(MODEL), str(file))
    file.write_bytes(f"{json.dumps(SCRIPT[0])}\n{text}\n".encode(errors="surrogateescape"))
    with pytest.raises(InvalidConfig, match=said) as refused:
        ReplyScript(open_model(MODEL), str(file))
    assert 'Write it as {"prompt": "weather", "reply": ' in str(refused.value)
