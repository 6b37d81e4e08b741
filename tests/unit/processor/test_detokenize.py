"""Streams of ids against the tokenizer's own decoding of all of them at once."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from pathlib import Path

import pytest
import tokenizers
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models, pre_tokenizers

import triptych
from triptych.model import Model, open_model
from triptych.processor.detokenize import Detokenizer
from triptych.processor.tokenizer import Tokenizer

ASSETS = Path(triptych.__file__).parent / "assets"
NAMES = ("qwen", "llava")


@cache
def tokenizer(name: str) -> Tokenizer:
    return Tokenizer(open_model(ASSETS / name))


def ids_of(name: str) -> st.SearchStrategy[list[int]]:
    """Any ids, half of them specials, bytes and ids that no token has."""
    known = tokenizer(name)
    raw = [id for id in range(known.vocabulary) if isinstance(known.pieces[id], bytes)]
    odd = [*known.specials.values(), known.vocabulary + 5, *raw]
    written = st.text("aé你🎉\n <", max_size=6).map(
        lambda text: known.library.encode(text, add_special_tokens=False).ids
    )
    one = st.one_of(st.integers(0, known.vocabulary - 1), st.sampled_from(odd)).map(lambda id: [id])
    return st.lists(st.one_of(one, written), max_size=24).map(lambda runs: sum(runs, []))


def chunked(ids: Sequence[int], cuts: Sequence[int]) -> list[Sequence[int]]:
    edges = sorted({0, len(ids), *(cut % (len(ids) + 1) for cut in cuts)})
    return [ids[a:b] for a, b in zip(edges, edges[1:], strict=False)]


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
@settings(max_examples=400, deadline=None)
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
@settings(max_examples=400, deadline=None)
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
