"""Encoding off the loop, and what single tokens stand for."""

from __future__ import annotations

import asyncio
import json
import shutil
import threading
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from hypothesis import example, given, settings
from hypothesis import strategies as st

import triptych
from triptych.checkpoint import open_model
from triptych.errors import ContextLengthExceeded, InvalidValue, UnsupportedModel
from triptych.prompt.tokenizer import (
    CHARACTERS_PER_TOKEN,
    INLINE_CHARACTERS,
    MAX_SEGMENT_CHARACTERS,
    PIECE_CHARACTERS,
    Tokenizer,
    encode_text,
)

ASSETS = Path(triptych.__file__).parent / "assets"
QWEN = Tokenizer(open_model(ASSETS / "qwen"))


@pytest.fixture(scope="module", params=["qwen", "llava"])
def tokenizer(request: pytest.FixtureRequest) -> Tokenizer:
    return Tokenizer(open_model(ASSETS / request.param))


def test_a_folder_without_a_tokenizer_says_what_to_do(tmp_path: Path) -> None:
    shutil.copy(ASSETS / "qwen" / "config.json", tmp_path)
    with pytest.raises(UnsupportedModel, match="save_pretrained"):
        Tokenizer(open_model(tmp_path))
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(UnsupportedModel, match="not a valid tokenizer"):
        Tokenizer(open_model(tmp_path))


async def test_text_comes_back(tokenizer: Tokenizer) -> None:
    for text in ("Hello, 世界 🎉\n\t", "e\u0301 naïve".replace("e\u0301", "é")):
        assert await tokenizer.decode(await tokenizer.encode(text)) == text


async def test_special_tokens_are_added_on_demand(tokenizer: Tokenizer) -> None:
    bare, full = await tokenizer.encode("cat"), await tokenizer.encode("cat", special=True)
    start = [tokenizer.specials["<s>"]] if "<s>" in tokenizer.specials else []
    assert full == start + bare
    assert await tokenizer.decode(full) == "cat"
    assert (await tokenizer.decode(full, skip_special=False)).startswith("<s>") == bool(start)


async def test_long_texts_are_encoded_in_a_thread(tokenizer: Tokenizer) -> None:
    here = threading.current_thread()
    assert await tokenizer.run(INLINE_CHARACTERS, threading.current_thread) is here
    long = await tokenizer.run(INLINE_CHARACTERS + 1, threading.current_thread)
    longer = await tokenizer.run(PIECE_CHARACTERS + 1, threading.current_thread)
    assert here not in (long, longer)
    assert long is not longer
    text = "the cat " * INLINE_CHARACTERS
    ids = await tokenizer.encode(text)
    assert ids == tokenizer.library.encode(text, add_special_tokens=False).ids
    assert await tokenizer.decode(ids) == text


async def test_no_text_waits_for_those_beyond_measure(tokenizer: Tokenizer) -> None:
    gate = threading.Event()
    longest = [
        asyncio.create_task(tokenizer.run(PIECE_CHARACTERS + 1, gate.wait)) for _ in range(8)
    ]
    text = "the cat " * INLINE_CHARACTERS
    assert len(await tokenizer.encode(text[: 2 * INLINE_CHARACTERS])) > 0
    assert await asyncio.to_thread(lambda: "another thing") == "another thing"
    assert not any(task.done() for task in longest)
    gate.set()
    assert all(await asyncio.gather(*longest))


class Counting:
    """Stands before a library and counts the characters that it is asked to encode."""

    def __init__(self, library: tokenizers.Tokenizer) -> None:
        self.library = library
        self.characters = 0

    def encode_batch_fast(self, texts: list[str], **options: bool) -> list[tokenizers.Encoding]:
        self.characters += sum(map(len, texts))
        return self.library.encode_batch_fast(texts, **options)


def test_a_text_that_cannot_fit_is_refused_before_all_of_it_is_encoded(
    tokenizer: Tokenizer,
) -> None:
    library: Any = Counting(tokenizer.library)
    with pytest.raises(ContextLengthExceeded, match=r"over \d+ tokens, but the context holds 1000"):
        encode_text(library, "the cat " * (PIECE_CHARACTERS * 4), limit=1000)
    assert library.characters <= 2 * PIECE_CHARACTERS


def test_a_text_that_just_fits_is_encoded(tokenizer: Tokenizer) -> None:
    """However long it is: what is found out piece by piece never refuses too much."""
    vocabulary = tokenizer.library.get_vocab()
    word = max((word for word in vocabulary if word.isascii() and word.isalpha()), key=len)
    text = f"{word} " * (2 * PIECE_CHARACTERS // len(word))
    ids = tokenizer.library.encode(text, add_special_tokens=False).ids
    assert len(text) > max(PIECE_CHARACTERS, CHARACTERS_PER_TOKEN * len(ids))
    assert encode_text(tokenizer.library, text, limit=len(ids)) == ids
    with pytest.raises(ContextLengthExceeded):
        encode_text(tokenizer.library, text, limit=len(ids) - 1)


async def test_bytes_that_are_not_text_are_refused(tokenizer: Tokenizer) -> None:
    with pytest.raises(InvalidValue, match="surrogate"):
        await tokenizer.encode("\ud800")
    for ids in ([-1], [1 << 40]):
        with pytest.raises(InvalidValue, match="vocabulary"):
            await tokenizer.decode(ids)


def test_bytes_of_tokens(tokenizer: Tokenizer) -> None:
    for text in ("cat", "你", "🎉", "\n"):
        ids = tokenizer.library.encode("x" + text, add_special_tokens=False).ids
        assert b"".join(map(tokenizer.token_bytes, ids)).strip(b" ").startswith(b"x")
        assert b"".join(map(tokenizer.token_bytes, ids)).endswith(text.encode())
    for word, id in tokenizer.specials.items():
        assert tokenizer.token_bytes(id) == word.encode()
        assert tokenizer.pieces[id] == ""
    assert tokenizer.token_bytes(10**6) == b""
    assert 10**6 not in tokenizer.pieces


def test_every_byte_has_a_token(tokenizer: Tokenizer) -> None:
    single = {tokenizer.token_bytes(id) for id in range(tokenizer.vocabulary)}
    assert {bytes([byte]) for byte in range(256)} <= single


def test_styles_of_decoders(tmp_path: Path) -> None:
    for name in ("config.json", "tokenizer.json"):
        shutil.copy(ASSETS / "llava" / name, tmp_path)
    description = json.loads((tmp_path / "tokenizer.json").read_text())

    def style() -> tuple[str, bool]:
        (tmp_path / "tokenizer.json").write_text(json.dumps(description))
        opened = Tokenizer(open_model(tmp_path))
        return opened.style, opened.strips

    assert style() == ("runs", True)
    strip = description["decoder"]["decoders"].pop()
    assert style() == ("runs", False)
    description["decoder"]["decoders"].append(strip | {"stop": 1})
    assert style() == ("other", False)
    description["decoder"] = None
    assert style() == ("other", False)
    description["decoder"] = json.loads((ASSETS / "qwen" / "tokenizer.json").read_text())["decoder"]
    assert style() == ("bytes", False)


@given(text=st.text(alphabet=st.sampled_from("ab <|>im_startend\n\u00e9e\u0301世🎉 "), max_size=60))
@example(text="<|im_start|>user\nHello<|im_end|>\n<|im_start|><|im_start|>  ")
@example(text="<|im_start|>" + "long " * 200 + "<|image_pad|>e\u0301")
@settings(deadline=None)
def test_stretch_by_stretch_gives_the_same_ids(text: str) -> None:
    """Also where control tokens touch, are cut short or stand at the ends; twice, to remember."""
    specials = list(QWEN.specials)
    for whole in (text, text.join(specials), specials[1] + text + specials[2] + text):
        want = QWEN.library.encode(whole, add_special_tokens=False).ids
        assert asyncio.run(QWEN.encode(whole)) == want
        assert asyncio.run(QWEN.encode(whole)) == want


def test_few_segments_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("triptych.prompt.tokenizer.CACHED_SEGMENTS", 40)
    one = Tokenizer(open_model(ASSETS / "qwen"))
    assert one._segments is not None
    for number in range(100):
        text = f"<|im_start|>user {number}<|im_end|>" + "long " * 200
        assert one.ids(text) == encode_text(one.library, text)
        assert len(one._segments._known) <= 40 + len(one._segments._added)
        assert max(map(len, one._segments._known)) <= MAX_SEGMENT_CHARACTERS


def test_many_added_tokens_leave_room_for_segments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("triptych.prompt.tokenizer.CACHED_SEGMENTS", 4)
    one = Tokenizer(open_model(ASSETS / "qwen"))
    assert one._segments is not None
    assert len(one._segments._added) > 4
    one.ids("first<|im_start|>second")
    assert {"first", "second"} <= {*one._segments._known}


def test_only_independent_segments_are_encoded_alone() -> None:
    """A tokenizer that marks the start of a text looks at more than one stretch."""
    assert QWEN._segments is not None
    assert Tokenizer(open_model(ASSETS / "llava"))._segments is None
