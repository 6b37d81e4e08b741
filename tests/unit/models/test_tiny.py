from __future__ import annotations

import functools
import itertools
import json
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from safetensors.torch import load_file
from tokenizers import Tokenizer
from tools import tiny

import reference
from support.pictures import draw
from triptych.checkpoint import Model
from triptych.errors import UnsupportedModel

LLAVA = "USER: <image>\nWhat is this? ASSISTANT:"
QWEN = (
    "<|im_start|>user\n<|vision_start|><|image_pad|><|vision_end|>What is this?"
    "<|im_end|>\n<|im_start|>assistant\n"
)


def prompt_for(model: Model) -> str:
    return LLAVA if model.family == "llava" else QWEN


@functools.cache
def answer(folder: Path, text: str, *pictures: int) -> reference.Reference:
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    prompt = tokenizer.encode(text, add_special_tokens=False).ids
    assert prompt.count(reference.image_token(folder)) == len(pictures)
    shown = [draw(index) for index in pictures]
    ids = reference.expand(folder, prompt, shown)
    return reference.generate(folder, ids, shown, 24)


def answers(model: Model, pictures: range) -> list[reference.Reference]:
    return [answer(model.folder, prompt_for(model), index) for index in pictures]


def test_answers_depend_on_the_picture(model: Model) -> None:
    given = answers(model, range(40))
    pairs = list(itertools.combinations([answer.ids for answer in given], 2))
    first = sum(a[0] != b[0] for a, b in pairs) / len(pairs)
    soon = sum(a[:3] != b[:3] for a, b in pairs) / len(pairs)
    assert first > 0.6
    assert soon > 0.95
    plain = list(itertools.combinations([answer.ids for answer in given[::4]], 2))
    assert sum(a[:3] != b[:3] for a, b in plain) > 0.9 * len(plain)


def test_answers_wander_and_are_far_from_ties(model: Model) -> None:
    given = answers(model, range(20))
    assert all(len(answer.ids) == 24 for answer in given)  # no end token
    varied = sorted(len(set(answer.ids)) for answer in given)
    assert varied[len(varied) // 2] > 12
    gaps = sorted(gap for answer in given for gap in answer.gaps)
    assert gaps[len(gaps) // 100] > 1e-3
    assert gaps[len(gaps) // 2] > 0.3


def test_answers_depend_on_the_words(model: Model) -> None:
    other = prompt_for(model).replace("What is this?", "Who was that?")
    changed = [answer(model.folder, other, index).ids for index in range(8)]
    same = [a.ids[:8] == b[:8] for a, b in zip(answers(model, range(8)), changed, strict=True)]
    assert sum(same) <= 1


def test_answers_depend_on_each_of_several_pictures(model: Model) -> None:
    text = re.sub(r"(<image>\n|<.vision_start.>.*<.vision_end.>)", r"\1\1\1", prompt_for(model))
    cold = answer(model.folder, text, 41, 42, 43)
    for other in ((45, 42, 43), (41, 45, 43), (41, 42, 45), (42, 41, 43)):
        assert answer(model.folder, text, *other).ids[:8] != cold.ids[:8]


def test_the_seed_decides(tmp_path: Path, model: Model) -> None:
    stored = load_file(model.folder / "model.safetensors")
    same = load_file(tiny.make_checkpoint(model.family, tmp_path / "same") / "model.safetensors")
    other = load_file(
        tiny.make_checkpoint(model.family, tmp_path / "other", seed=1) / "model.safetensors"
    )
    assert all(stored[name].equal(same[name]) for name in stored)
    assert sum(stored[name].equal(other[name]) for name in stored) < len(stored) / 2


def test_the_folder_is_complete(model: Model) -> None:
    names = {path.name for path in model.folder.iterdir()}
    assert names >= {
        "config.json",
        "generation_config.json",
        "preprocessor_config.json",
        "tokenizer.json",
        "tokenizer_config.json",
        "chat_template.jinja",
        "model.safetensors",
    }
    tokenizer = Tokenizer.from_file(str(model.folder / "tokenizer.json"))
    assert model.context == 4096
    assert model.vocabulary >= tokenizer.get_vocab_size()
    ends = json.loads((model.folder / "tokenizer_config.json").read_text())["eos_token"]
    assert tokenizer.token_to_id(ends) in model.end_ids


def test_many_processes_may_create_a_checkpoint_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with ThreadPoolExecutor(3) as pool:
        made = set(pool.map(lambda _: tiny.ensure_checkpoint("llava"), range(3)))
    assert made == {tiny.default_folder("llava")}
    assert [path.name for path in (tmp_path / "triptych").iterdir()] == [made.pop().name]
    assert tiny.default_folder("llava") != tiny.default_folder("qwen2_5_vl")


def test_a_failure_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiny, "_fill", lambda *_, **__: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        tiny.make_checkpoint("llava", tmp_path / "broken")
    assert not list(tmp_path.iterdir())


def test_an_unknown_family(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModel, match=r"llava.*qwen2_5_vl"):
        tiny.make_checkpoint("gpt9", tmp_path / "x")
