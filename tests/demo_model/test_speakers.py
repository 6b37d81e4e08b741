"""Which recordings the voices are measured with."""

from types import SimpleNamespace

import numpy as np

from models.demo import speakers


def test_words_that_the_model_is_not_to_know_are_left_out(monkeypatch):
    store = SimpleNamespace(
        kept={"seven": [0], "dog": [1], "umbrella": [2]},
        speakers=["rms", "ked", "rms"],
        clip=lambda number: np.ones(800, np.float32),
    )
    monkeypatch.setattr(speakers, "speech", lambda: store)
    asked = [(voice, one.task, one.turn.truth) for voice, one in speakers.recordings()]
    assert asked == [("rms", "spoken digit", ("seven",)), ("ked", "spoken word", ("dog",))]
