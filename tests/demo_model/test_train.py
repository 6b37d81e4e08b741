"""Training goes on where it stopped, and what it writes can be read back."""

from __future__ import annotations

import argparse
import json
import random

import pytest
import torch

from models.demo import batch as batches
from models.demo import exams, export, learning, network, stream, train
from models.demo.padded import Padded
from models.demo.recipe import chat, scenes
from models.demo.recipe.sample import Split

SMALL = (2, 3, 1, 1, 24, 240)
A_STEP_OR_TWO = 0.01  # seconds


@pytest.fixture
def small(monkeypatch):
    """Makers that need no data, a batch of two samples, and a network of one layer each."""
    makers = {"count": scenes.count, "shape": scenes.shape}
    monkeypatch.setattr(exams, "MAKERS", makers)
    monkeypatch.setattr(stream, "MAKERS", makers)
    monkeypatch.setattr(train, "SHARES", {"count": (0.5, "count"), "shape": (0.5, "shape")})
    monkeypatch.setattr(train, "ROOM", SMALL)
    config = network.thinker_config

    def shallow(tokenizer):
        made = config(tokenizer)
        made["text_config"] |= {"num_hidden_layers": 1}
        made["vision_config"] |= {"depth": 1, "fullatt_block_indexes": [0]}
        made["audio_config"] |= {"encoder_layers": 1}
        return made

    monkeypatch.setattr(network, "thinker_config", shallow)


def _given(folder, out: str) -> argparse.Namespace:
    return argparse.Namespace(
        state=folder / "state",
        out=folder / out,
        weights=None,
        peak=1e-3,
        exams=None,
        wall=None,
        seconds=A_STEP_OR_TWO,
        total=10.0,
        device="cpu",
        workers=0,
        scale=1.0,
        tell=1,
        seed=1,
        compile=False,
    )


def _run(given: argparse.Namespace) -> None:
    train.Piece(given).run()


def _log(folder):
    (file,) = folder.glob("log-*.jsonl")
    return [json.loads(line) for line in file.read_text().splitlines()]


def test_a_second_piece_goes_on_from_the_first(small, tmp_path):
    _run(_given(tmp_path, "one"))
    first = _log(tmp_path / "one")
    kept = torch.load(tmp_path / "state" / "state.pt", weights_only=True)
    given = _given(tmp_path, "two")
    given.seconds = 0.0
    _run(given)
    found = torch.load(tmp_path / "state" / "state.pt", weights_only=True)
    assert all(torch.equal(found["exact"][name], w) for name, w in kept["exact"].items())
    _run(_given(tmp_path, "three"))
    second = _log(tmp_path / "three")
    steps = [line["step"] for line in first + second if "step" in line]
    assert steps == list(range(1, len(steps) + 1))
    assert len(steps) > len([line for line in first if "step" in line])


def test_steps_learn(small):
    torch.manual_seed(1)
    parts = network.build(network.read_tokenizer())
    weights = learning.Weights(parts, torch.float32)
    score = learning.Score(torch.device("cpu"))
    drawn = stream.Stream(torch.ones(2), batches.Room(*SMALL), 1, Split.TRAIN)
    batch = stream.moved(next(iter(drawn)), torch.device("cpu"))
    step = learning.Step(Padded(parts), weights, score)
    step.prepare(batch)
    weights.rate.fill_(1e-3)
    losses = []
    for _ in range(6):
        step(batch)
        losses.append(sum(loss for loss, _, _ in score.take().values()))
    assert losses[-1] < 0.8 * losses[0]


def test_what_a_piece_writes_is_a_checkpoint(small, tmp_path):
    _run(_given(tmp_path, "out"))
    export.main(tmp_path / "out", tmp_path / "model")
    state = torch.load(tmp_path / "state" / "state.pt", weights_only=True)
    made = export.load_file(tmp_path / "model" / "model.safetensors")
    assert made.keys() == {f"thinker.{name}" for name in state["exact"]}
    name = "model.embed_tokens.weight"
    assert torch.equal(made[f"thinker.{name}"], state["exact"][name].bfloat16())


def test_a_piece_begins_with_other_weights_and_looks_at_held_out_samples(small, tmp_path):
    room = batches.Room(*SMALL)
    exams.draw(tmp_path / "exams", room, 1)
    _run(_given(tmp_path, "out"))
    given = _given(tmp_path, "more")
    given.state, given.exams, given.seconds = tmp_path / "other", tmp_path / "exams", 0.0
    given.weights = tmp_path / "out" / "weights.safetensors"
    _run(given)
    first, second = (
        export.load_file(tmp_path / name / "weights.safetensors") for name in ("out", "more")
    )
    assert all(torch.equal(weight, second[name]) for name, weight in first.items())
    looked = {line["held_out"] for line in _log(tmp_path / "more") if "held_out" in line}
    assert looked == {"test", "new", "plain", "pattern", "texture"}


def test_rates_rise_stay_and_fall():
    assert train.rate_at(0.0, 0) < train.rate_at(0.1, train.WARM_STEPS) == learning.PEAK
    assert train.rate_at(0.7, 10_000) < learning.PEAK
    assert train.rate_at(1.0, 10_000) == pytest.approx(train.LAST)


def test_what_fails_is_drawn_more_often(small):
    shares = torch.zeros(2)
    train.shift(shares, {"count": (1.0, 0.5, 10), "shape": (0.0, 1.0, 10)})
    assert shares[0] > 3 * shares[1] > 0


def test_samples_are_drawn_until_one_does_not_fit(small):
    drawn = stream.Stream(torch.ones(2), batches.Room(*SMALL), 1, Split.TRAIN)
    for batch, _ in zip(drawn, range(4), strict=False):
        assert (batch["ids"][:, 0] > 0).sum() == 2  # both samples are there


def test_recording_leaves_the_optimiser_as_it_was(small):
    weights = learning.Weights(network.build(network.read_tokenizer()), torch.float32)
    for weight in weights.used.values():
        weight.grad = torch.ones_like(weight)
    weights.step()
    kept = weights.moments()
    weights.step()
    assert any(
        (kept[name]["exp_avg"] != now["exp_avg"]).any() for name, now in weights.moments().items()
    )
    weights.put_back(kept)
    for name, now in weights.moments().items():
        assert all(torch.equal(value, kept[name][kind]) for kind, value in now.items())
    weights.put_back({})
    assert not any(value.any() for now in weights.moments().values() for value in now.values())


def test_talk_is_made_without_data():
    assert chat.talk(random.Random(1), Split.TRAIN, 1).turns
