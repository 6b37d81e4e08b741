"""The comparison with plain transformers: what is asked, and what counts as equal."""

import numpy as np
import pytest

from models.demo import compare, scores
from models.demo.asking import Answer, Question
from models.demo.recipe.sample import Picture, Sample, Turn

RUN = scores.Run("", "", 0, "", {}, "", "")


def plain(rng, split, turns):
    picture = Picture(np.full((8, 8, 3), rng.randrange(256), np.uint8))
    return Sample((picture,), (Turn("plain", "What?", "This.", ("this",), frozenset({"this"})),))


def answer(*logprobs, ids=(1, 2)):
    return Answer("", ids, (), logprobs)


def asked(count):
    turn = Turn("plain", "What?", "This.", ("this",), frozenset({"this"}))
    return [Question("plain", number, turn) for number in range(count)]


def test_every_task_has_its_share():
    chosen = compare.chosen({"one": plain, "two": plain, "three": plain}, 8)
    assert [(one.task, one.number) for one in chosen] == [
        *(("one", number) for number in range(3)),
        *(("two", number) for number in range(3)),
        *(("three", number) for number in range(2)),
    ]


def test_other_tokens_are_counted_and_named():
    ours = [answer(-0.1, -0.2), answer(-0.1, -0.2), answer(-0.5, -0.6, ids=(3, 4))]
    theirs = [answer(-0.1, -0.2001), answer(-0.0997, -0.2), answer(-0.5, -0.9, ids=(3, 5))]
    found = compare.found(asked(3), ours, theirs, RUN)
    assert (found.count, found.equal) == (3, 2)
    assert found.differing == ["plain:2"]
    assert found.logprob_difference == pytest.approx(3e-4)


def test_nothing_equal_has_no_difference():
    found = compare.found(asked(1), [answer(-0.1, ids=(1,))], [answer(-0.1, ids=(2,))], RUN)
    assert (found.equal, found.logprob_difference) == (0, 0.0)
