"""Streams of ids against the tokenizer's own decoding of all of them at once."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Sequence
from functools import cache
from itertools import chain, pairwise
from pathlib import Path

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

import triptych
from triptych.checkpoint import open_model
from triptych.prompt.detokenizer import Detokenizer
from triptych.prompt.tokenizer import Tokenizer

ASSETS = Path(triptych.__file__).parent / "assets"
NAMES = ("qwen", "llava")
ADDED = ("<tool>", "a b", "é", "日本", "\n\n")  # in the vocabulary, and no special tokens


@cache
def tokenizer(name: str) -> Tokenizer:
    """A tokenizer that ships, with some added tokens that are text."""
    with tempfile.TemporaryDirectory() as folder:
        library = tokenizers.Tokenizer.from_file(str(ASSETS / name / "tokenizer.json"))
        library.add_tokens(list(ADDED))
        library.save(f"{folder}/tokenizer.json")
        shutil.copy(ASSETS / name / "config.json", folder)
        return Tokenizer(open_model(folder))


def ids_of(name: str) -> st.SearchStrategy[list[int]]:
    """Any ids, half of them specials, bytes and ids that no token has."""
    known = tokenizer(name)
    raw = [id for id in range(known.vocabulary) if isinstance(known.pieces[id], bytes)]
    text = [known.library.token_to_id(word) for word in ADDED]
    odd = [*known.specials.values(), known.vocabulary + 5, *text, *raw]
    written = st.text("aé你🎉\n <", max_size=6).map(
        lambda text: known.library.encode(text, add_special_tokens=False).ids
    )
    one = st.one_of(st.integers(0, known.vocabulary - 1), st.sampled_from(odd)).map(lambda id: [id])
    return st.lists(st.one_of(one, written), max_size=24).map(lambda runs: list(chain(*runs)))


def chunked(ids: Sequence[int], cuts: Sequence[int]) -> list[Sequence[int]]:
    edges = sorted({0, len(ids), *(cut % (len(ids) + 1) for cut in cuts)})
    return [ids[a:b] for a, b in pairwise(edges)]


def stopped_text(
    known: Tokenizer, ids: Sequence[int], stops: Sequence[str]
) -> tuple[str, int, bool]:
    """Text, ids used and whether it stopped, by decoding everything again after each id."""
    for used in range(1, len(ids) + 1):
        text = known.library.decode(ids[:used])
        if used < len(ids) and text.endswith("�"):
            text = text.rstrip("�")  # perhaps the next id completes it
        found = [(text.find(stop) + len(stop), text.find(stop)) for stop in stops if stop in text]
        if found:
            return text[: min(found)[1]], used, True
    return known.library.decode(ids), len(ids), False


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_pushes_put_together_are_the_whole_decoded(name: str, data: st.DataObject) -> None:
    ids = data.draw(ids_of(name))
    chunks = chunked(ids, data.draw(st.lists(st.integers(0, 99), max_size=8)))
    stream = Detokenizer(tokenizer(name))
    shown = [stream.push(chunk) for chunk in chunks]
    shown.append(stream.push((), last=True))
    assert "".join(shown) == tokenizer(name).library.decode(ids)
    assert stream.used == len(ids)
    assert not stream.stopped


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_stop_strings_cut_as_the_whole_text_says(name: str, data: st.DataObject) -> None:
    ids = data.draw(ids_of(name))
    text = tokenizer(name).library.decode(ids).replace("�", "")
    inside = st.tuples(st.integers(0, len(text)), st.integers(1, 6)).map(
        lambda span: text[span[0] : span[0] + span[1]]
    )
    drawn = st.one_of(inside, st.text("aé你 \n", max_size=3))
    stops = tuple(stop for stop in data.draw(st.lists(drawn, max_size=4)) if stop)
    expected, used, stopped = stopped_text(tokenizer(name), ids, stops)
    stream = Detokenizer(tokenizer(name), stops)
    shown = ""
    for chunk in chunked(ids, data.draw(st.lists(st.integers(0, 99), max_size=8))):
        shown += stream.push(chunk)
        assert expected.startswith(shown)
    shown += stream.push((), last=True)
    assert (shown, stream.used, stream.stopped) == (expected, used, stopped)


def say(name: str, text: str) -> list[int]:
    return tokenizer(name).library.encode(text, add_special_tokens=False).ids


@pytest.mark.parametrize("name", NAMES)
def test_no_half_character_is_shown(name: str) -> None:
    stream = Detokenizer(tokenizer(name))
    ids = say(name, "x🎉y")
    shown = [stream.push([id]) for id in ids]
    assert "".join(shown) + stream.push((), last=True) == "x🎉y"
    assert not any("�" in text for text in shown)


@pytest.mark.parametrize("name", NAMES)
def test_a_special_token_inside_of_a_character_is_nothing(name: str) -> None:
    ids = say(name, "x🎉")
    ids.insert(-1, next(iter(tokenizer(name).specials.values())))
    stream = Detokenizer(tokenizer(name))
    assert "".join(stream.push([id]) for id in ids) + stream.push((), last=True) == "x🎉"


@pytest.mark.parametrize("name", NAMES)
def test_an_incomplete_character_is_replaced_at_the_end(name: str) -> None:
    stream = Detokenizer(tokenizer(name))
    ids = say(name, "x🎉")[:-1]
    assert "".join(stream.push([id]) for id in ids) == "x"
    assert stream.push((), last=True) == tokenizer(name).library.decode(ids)[1:] != ""


@pytest.mark.parametrize("name", NAMES)
def test_the_start_of_a_stop_string_is_held_back(name: str) -> None:
    stream = Detokenizer(tokenizer(name), ("STOP!",))
    assert stream.push(say(name, "go STO")) == "go "
    assert stream.push((), last=True) == "STO"
    assert not stream.stopped


@pytest.mark.parametrize("name", NAMES)
def test_a_stop_string_ends_the_text_before_it(name: str) -> None:
    ids = say(name, "one two\nthree")
    stream = Detokenizer(tokenizer(name), ("\n",))
    shown = [stream.push([id]) for id in ids]
    assert "".join(shown) == "one two"
    assert stream.stopped
    assert stream.used == len(say(name, "one two\n"))  # found at once, though it is a byte
    assert stream.push(ids, last=True) == ""


@pytest.mark.parametrize("name", NAMES)
def test_the_stop_string_that_is_complete_first_counts(name: str) -> None:
    for stops, expected in ((("bcde", "cd"), "ab"), (("d", "bcd"), "a"), (("x", "e"), "abcd")):
        stream = Detokenizer(tokenizer(name), stops)
        assert stream.push(say(name, "abcde")) == expected
        assert stream.stopped


@pytest.mark.parametrize("name", NAMES)
def test_an_end_id_is_not_shown(name: str) -> None:
    ids = say(name, "one two three")
    stream = Detokenizer(tokenizer(name), ("one two t",), end_ids=(ids[-1],))
    shown = stream.push(ids[:-1])
    shown += stream.push([ids[-1], *ids])
    assert shown == tokenizer(name).library.decode(ids[:-1])
    assert stream.stopped
    assert stream.used == len(ids)


@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_other_tokenizers_are_left_to_the_library(data: st.DataObject) -> None:
    known = metaspace()
    assert known.style == "other"
    text = data.draw(st.text("abcé你 🎉\n", max_size=20))
    ids = known.library.encode(text, add_special_tokens=False).ids
    stream = Detokenizer(known)
    shown = "".join(
        stream.push(chunk)
        for chunk in chunked(ids, data.draw(st.lists(st.integers(0, 99), max_size=8)))
    )
    assert shown + stream.push((), last=True) == known.library.decode(ids)


@cache
def metaspace() -> Tokenizer:
    with tempfile.TemporaryDirectory() as folder:
        description = json.loads((ASSETS / "llava" / "tokenizer.json").read_text())
        metaspace = description["pre_tokenizer"]
        description["decoder"] = {
            "type": "Sequence",
            "decoders": [{"type": "ByteFallback"}, metaspace],
        }
        (Path(folder) / "tokenizer.json").write_text(json.dumps(description))
        shutil.copy(ASSETS / "llava" / "config.json", folder)
        return Tokenizer(open_model(folder))


def test_an_id_outside_the_vocabulary_changes_no_other_text() -> None:
    tokenizer = Tokenizer(open_model(ASSETS / "qwen"))
    good = tokenizer.library.encode("good").ids
    assert Detokenizer(tokenizer).push([*good, 1 << 40, -1, *good], last=True) == "goodgood"
    assert tokenizer.token_bytes(1 << 40) == b""


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_kept_special_tokens_are_text(name: str, data: st.DataObject) -> None:
    """If all are kept, the text is what the tokenizer decodes without skipping any."""
    known = tokenizer(name)
    ids = data.draw(ids_of(name))
    stream = Detokenizer(known, kept=(*known.specials, "no token"))
    shown = "".join(
        stream.push(chunk)
        for chunk in chunked(ids, data.draw(st.lists(st.integers(0, 99), max_size=8)))
    )
    whole = known.library.decode(ids, skip_special_tokens=False)
    assert shown + stream.push((), last=True) == whole


@pytest.mark.parametrize("known", [tokenizer("qwen"), tokenizer("llava"), metaspace()])
def test_other_special_tokens_have_no_text(known: Tokenizer) -> None:
    first, second = list(known.specials)[:2]
    words = [known.library.encode(word, add_special_tokens=False).ids for word in ("one", "two")]
    ids = [*words[0], known.specials[first], known.specials[second], *words[1]]
    plain, kept = Detokenizer(known), Detokenizer(known, kept=(second,))
    text = plain.push(ids, last=True)
    assert first not in text
    assert second not in text
    assert kept.push(ids, last=True) == text[:3] + second + text[3:]


def test_pieces_are_shared_where_no_special_token_is_kept() -> None:
    known = tokenizer("qwen")
    assert known.pieces_with(("no token",)) is known.pieces
    kept = tuple(known.specials)[:1]
    assert known.pieces_with(kept) is known.pieces_with(kept)
    assert known.pieces_with(kept) is not known.pieces


@pytest.mark.parametrize("known", [tokenizer("qwen"), tokenizer("llava"), metaspace()])
def test_an_incomplete_character_before_a_kept_special_token_is_shown(known: Tokenizer) -> None:
    kept = next(iter(known.specials))
    half = known.library.encode("🎉", add_special_tokens=False).ids[:-1]
    shown = Detokenizer(known, kept=(kept,)).push([*half, known.specials[kept]])
    assert shown.endswith("�" + kept)
