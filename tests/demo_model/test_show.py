"""The contact sheet shows every medium, and fails on answers that their own truth denies."""

import random
import sys

import numpy as np
import pytest

from models.demo.recipe import show
from models.demo.recipe.sample import RATE, Clip, Picture, Sample, Sound, Turn


def test_a_sheet_holds_every_medium():
    media = (
        Picture(np.zeros((40, 60, 3), np.uint8)),
        Clip(np.zeros((8, 30, 30, 3), np.uint8), 4.0),
        Sound(np.sin(np.arange(RATE) / 9).astype(np.float32)),
    )
    turn = Turn("colour", "Which colour?", "It is red.", ("red",), frozenset({"red"}))
    cell = show.cell(Sample(media, (turn,)))
    assert cell.width > sum(show.looks(medium).width for medium in media)
    whole = show.sheet([Sample(media, (turn,)), Sample((), (turn,))], columns=1)
    assert whole.height > cell.height + show.LINE


def wrong(rng: random.Random, split, turns):
    return Sample((), (Turn("colour", "Which?", "It is blue.", ("red",), frozenset({"red"})),))


def test_a_wrong_answer_is_shown(tmp_path, monkeypatch):
    monkeypatch.setattr(show, "named", lambda name: wrong)
    monkeypatch.setattr(sys, "argv", ["show", "wrong", "--out", str(tmp_path / "sheet.png")])
    with pytest.raises(SystemExit, match="24 answers"):
        show.main()
    assert (tmp_path / "sheet.png").exists()


def test_a_maker_is_named_by_module_and_function(tmp_path, monkeypatch, capsys):
    out = tmp_path / "sheet.png"
    arguments = ["models.demo.recipe.scenes:colour", "--count", "3", "--out", str(out)]
    monkeypatch.setattr(sys, "argv", ["show", *arguments])
    show.main()
    assert "3 samples" in capsys.readouterr().out
    assert out.exists()
