"""The tokenizer that ships belongs to the weights beside it."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from models.demo import network, tokenizer
from models.demo.recipe import scenes


def test_the_shipped_one_is_not_replaced_under_its_weights():
    before = (network.FOLDER / "tokenizer.json").read_bytes()
    with pytest.raises(SystemExit, match="know no other"):
        tokenizer.main()
    assert (network.FOLDER / "tokenizer.json").read_bytes() == before


def _shouting(rng, split, turns):
    sample = scenes.count(rng, split, turns)
    first = replace(sample.turns[0], answer="It says CAT CAT CAT.")
    return replace(sample, turns=(first, *sample.turns[1:]))


def test_a_new_one_gives_back_any_text_and_spells_capitals(monkeypatch, tmp_path):
    monkeypatch.setattr(tokenizer, "MAKERS", {"count": scenes.count, "shouting": _shouting})
    monkeypatch.setattr(tokenizer, "SAMPLES", 20)
    tokenizer.main(tmp_path)
    made = network.read_tokenizer(tmp_path)
    assert set(network.special_ids(made)) == set(network.SPECIAL)
    for text in ("How many circles are there?", "Grüße, 你好 <b>", "IT SAYS CAT\n  twice"):
        assert made.decode(made.encode(text).ids) == text
    assert not [
        piece for piece in made.get_vocab() if re.search("[A-Z]{2}", piece) and "|" not in piece
    ]
