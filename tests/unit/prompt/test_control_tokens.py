"""Typed control tokens: found in steps, marked, and read as plain text by the tokenizer's twin."""

from __future__ import annotations

import json
import shutil
from functools import cache
from itertools import chain
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from triptych.checkpoint import open_model, packaged_folder
from triptych.prompt import control_tokens
from triptych.prompt.control_tokens import ControlTokenEscaper
from triptych.prompt.tokenizer import Tokenizer

NAMES = ("qwen", "llava")
MARK = "\U0010ff00"


@cache
def made(name: str) -> ControlTokenEscaper:
    tokenizer = Tokenizer(open_model(packaged_folder(name)))
    return ControlTokenEscaper(tokenizer, tokenizer.specials.values())


def pieces(name: str) -> st.SearchStrategy[str]:
    """Control tokens, their halves, and what is none, in any order."""
    words = list(made(name)._tokenizer.specials)
    halves = chain.from_iterable((word[:4], word[4:]) for word in words)
    some = st.sampled_from([*words, *halves, "a", " ", "<", "é"])
    return st.lists(some, max_size=12).map("".join)


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=150, deadline=None)
@given(data=st.data(), step=st.integers(1, 20))
def test_steps_change_nothing(name: str, data: st.DataObject, step: int) -> None:
    """A long text is searched in steps, and what lies across two of them is found too."""
    known = made(name)
    specials = known._tokenizer.specials
    typed, around = data.draw(pieces(name)), data.draw(st.sampled_from(list(specials)))

    def read() -> tuple[bool, list[int]]:
        marked = known.escape(typed, MARK)
        assert marked.replace(MARK, "") == typed
        assert not any(word in marked for word in specials)
        return known.needs_escaping(typed), known.encode(f"{around}{marked}{around}{around}", MARK)

    want = read()
    with mock.patch.object(control_tokens, "SEARCH_STEP", step):
        assert read() == want


def test_words_that_overlap_are_all_marked(tmp_path: Path) -> None:
    known = ControlTokenEscaper(
        Tokenizer(open_model(changed(tmp_path, ["<a><a>", "<b><"]))), [3000, 3001]
    )
    marked = known.escape("<a><a><a><b><", MARK)
    assert not any(word in marked for word in ("<a><a>", "<b><"))


def changed(folder: Path, words: list[str], **options: Any) -> Path:
    """The packaged tokenizer with more added tokens, the first of them with id 3000."""
    for file in ("config.json", "tokenizer.json"):
        shutil.copy(packaged_folder("qwen") / file, folder)
    whole = json.loads((folder / "tokenizer.json").read_text())
    last = max(token["id"] for token in whole["added_tokens"])
    fill = [f"<fill{id}>" for id in range(last + 1, 3000)]
    plain = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized", "special"), False)
    for id, word in enumerate([*fill, *words], last + 1):
        options_of = options if word in words else {}
        whole["added_tokens"].append({"id": id, "content": word} | plain | options_of)
    (folder / "tokenizer.json").write_text(json.dumps(whole))
    return folder


def test_added_tokens_that_are_text_keep_their_ids(tmp_path: Path) -> None:
    tokenizer = Tokenizer(open_model(changed(tmp_path, ["<tool>"])))
    known = ControlTokenEscaper(tokenizer, tokenizer.specials.values())
    ids = known.encode(known.escape("a<tool><|im_end|>", MARK), MARK)
    assert ids.count(3000) == 1
    assert tokenizer.specials["<|im_end|>"] not in ids
    assert tokenizer.library.decode(ids, skip_special_tokens=False) == "a<tool><|im_end|>"


@pytest.mark.parametrize("step", [1, 4, 1 << 16])
def test_white_space_goes_to_the_token_that_swallows_it(step: int, tmp_path: Path) -> None:
    folder = changed(tmp_path, ["<end>"], special=True, lstrip=True, rstrip=True)
    tokenizer = Tokenizer(open_model(folder))
    known = ControlTokenEscaper(tokenizer, [tokenizer.specials["<|im_end|>"]])
    marked = known.escape("<|im_end|>", MARK)
    with mock.patch.object(control_tokens, "SEARCH_STEP", step):
        ids = known.encode(f"{marked}   <end> \n {marked}", MARK)
    assert tokenizer.library.decode(ids, skip_special_tokens=False) == "<|im_end|><end><|im_end|>"
