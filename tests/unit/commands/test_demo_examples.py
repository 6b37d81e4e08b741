"""The packaged examples: whole, true of their files, and judged by the words that decide."""

import io
from pathlib import Path

import av
import msgspec
import numpy as np
import pytest
from PIL import Image

from triptych.commands.demo import EXAMPLES, Example, examples

WORDS = ("red", "blue", "light", "light bulb", "yes", "no", "four")


def example(truth):
    return Example("What?", tuple(truth.split()), WORDS, ())


@pytest.mark.parametrize(
    ("truth", "answer", "right"),
    [
        ("red", "The circle is red.", True),
        ("red", "Red.", True),
        ("red", "It is blue, not red.", False),
        ("red", "It is coloured.", False),
        ("red blue", "Red, then blue.", True),
        ("blue red", "Red, then blue.", False),
        ("light", "It is a light.", True),
        ("light", "It is a light bulb.", False),
        ("yes four", "Yes, both are four.", True),
        ("yes four", "Yes.", False),
    ],
)
def test_the_words_that_decide_decide(truth, answer, right):
    assert example(truth).right(answer) is right


def test_there_is_one_of_every_kind_and_every_file_is_used():
    kinds = [tuple(item.kind for item in one.media) for one in examples()]
    assert {("image",), ("video",), ("audio",), ("image", "image"), ("image", "audio")} <= {*kinds}
    files = {item.file for one in examples() for item in one.media}
    assert files | {"examples.json", "README.md"} == {path.name for path in EXAMPLES.iterdir()}


@pytest.mark.parametrize("one", examples(), ids=lambda one: one.question)
def test_an_example_can_be_judged_right_or_wrong(one):
    assert one.truth
    assert set(one.truth) <= set(one.choices)
    assert not one.right("")


ITEMS = [item for one in examples() for item in one.media]


@pytest.mark.parametrize("item", ITEMS, ids=lambda item: item.file)
def test_what_is_shown_of_a_file_is_of_that_file(item):
    data = (EXAMPLES / item.file).read_bytes()
    assert item.about
    if item.kind == "audio":
        with av.open(io.BytesIO(data)) as file:
            wave = np.concatenate([f.to_ndarray().ravel() for f in file.decode(audio=0)])
        parts = np.array_split(wave / 32768, len(item.small.wave))
        loud = np.sqrt([np.mean(part**2) for part in parts])
        assert np.abs(loud / loud.max() - item.small.wave).max() < 0.02
        return
    if item.kind == "image":
        frames = [Image.open(io.BytesIO(data))]
    else:
        with av.open(io.BytesIO(data)) as file:
            frames = [frame.to_image() for frame in file.decode(video=0)]
    size = item.small.width, item.small.height
    for at in (0, -1):
        shown, frame = item.small.frames[at], frames[at]
        pixels = np.frombuffer(shown, np.uint8).reshape(size[1], size[0], 3).astype(float)
        assert np.abs(pixels - frame.convert("RGB").resize(size)).mean() < 12


def test_every_file_has_its_author():
    told = (EXAMPLES / "README.md").read_text()
    for item in ITEMS:
        assert f"`{item.file}`" in told
    assert "SIL Open Font License" in told


def test_a_changed_example_is_noticed_by_its_struct():
    text = (Path(EXAMPLES) / "examples.json").read_bytes().replace(b'"truth"', b'"truths"')
    with pytest.raises(msgspec.ValidationError):
        msgspec.json.decode(text, type=tuple[Example, ...])
