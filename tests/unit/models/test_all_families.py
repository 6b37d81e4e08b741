"""The contract of every family: an entry of the registry and a tiny checkpoint join it.

From a file's bytes to tokens, as the decode pool, the encoder and the engine do it one after the
other. ``tests/integration/test_families.py`` compares the tokens of every family with transformers,
and a file of its own tests what is special to a family.
"""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from tools.tiny_folder import tiny_families

from support import clips, pictures
from support.mixed import Mixed
from support.torch_engine import frozen, whole
from triptych import models
from triptych.checkpoint import KINDS, open_model
from triptych.config import Limits
from triptych.engines.base import ENGINES
from triptych.engines.torch import weights
from triptych.errors import UnsupportedModel
from triptych.media import prepare
from triptych.media.base import PreparedMedia
from triptych.messages import MediaItem, MediaKind, Sampling, Work
from triptych.models import FAMILIES
from triptych.models.layouts import locate_media

# The registry says what each takes; tests/e2e/test_docs.py compares docs/models.md with it.
TAKES: dict[str, set[MediaKind]] = {family: {*FAMILIES[family].takes} for family in tiny_families()}
PAIRS = [(family, kind) for family, kinds in TAKES.items() for kind in KINDS if kind in kinds]
# Where more than placeholders stands in the place of one: separators of tiles, times of moments.
WRITTEN_OUT = {("llama4", "image"), ("qwen3_vl", "video")}
PARTS: tuple[weights.ModelPart, ...] = ("encoder", "language")


@pytest.mark.parametrize("engine", ENGINES)
def test_every_engine_says_which_families_it_serves(engine):
    assert {*models.served_by(engine)} <= {*FAMILIES}


@pytest.fixture(scope="session")
def bench(benches):
    """The tiny checkpoint of a family, by its model type."""
    return benches


def file(kind: MediaKind, number: int) -> bytes:
    """Of many shapes and lengths."""
    if kind == "image":
        return pictures.encoded(pictures.draw(number))
    if kind == "video":
        return clips.video(number, frames=10 + 7 * number, width=64 + 32 * (number % 3))
    return clips.sound(number, seconds=0.5 + 0.4 * number)


def ready(bench: Mixed, kind: MediaKind, number: int) -> PreparedMedia:
    meta, arrays, cost, encoded = prepare.prepare(
        kind, "file", memoryview(file(kind, number)), bench.family.recipes, Limits(), False
    )
    assert not encoded
    return PreparedMedia(
        meta, tuple(frozen(torch.from_numpy(array.copy())) for array in arrays), cost
    )


def test_every_family_has_a_tiny_checkpoint() -> None:
    made = {FAMILIES[family].implementation for family in TAKES}
    assert made == {entry.implementation for entry in FAMILIES.values()}
    for entry in FAMILIES.values():
        assert set(entry.vllm_fields or ()) <= set(entry.takes)


@pytest.mark.parametrize("family", TAKES)
def test_it_takes_what_it_promises(bench, family: str) -> None:
    recipes, model = bench(family).family.recipes, bench(family).model
    taken = {kind for kind in KINDS if getattr(recipes, kind) is not None}
    assert taken == TAKES[family]
    assert taken <= set(model.media_ids)
    assert len(set(model.media_ids.values())) == len(model.media_ids)
    assert recipes.revision == model.revision


@pytest.mark.parametrize("family", TAKES)
def test_each_half_is_loaded_without_the_other(bench, family: str, tmp_path: Path) -> None:
    whole_folder, model = bench(family).folder, bench(family).model
    stored = load_file(whole_folder / "model.safetensors")
    named = {name: bench(family).family.weight_name(name) for name in stored}
    assert {part for part, _ in filter(None, named.values())} == set(PARTS)
    for part, other in (PARTS, PARTS[::-1]):
        half = {
            name: stored[name] for name, to in named.items() if to is not None and to[0] == part
        }
        folder = tmp_path / part
        folder.mkdir()
        for path in whole_folder.glob("*.json"):
            (folder / path.name).write_bytes(path.read_bytes())
        save_file(half, folder / "model.safetensors")
        lone = open_model(folder)
        module = weights.load_part(models.find_family(lone), lone, part, "cpu", torch.float32)
        assert weights.count_parameters(module) == sum(tensor.numel() for tensor in half.values())
        with pytest.raises(UnsupportedModel, match=f"lacks weights of its {other}"):
            weights.load_part(models.find_family(lone), lone, other, "cpu", torch.float32)
    assert model.revision == lone.revision


@pytest.mark.parametrize("family", TAKES)
def test_words_alone_stay_as_they_are(bench, family: str) -> None:
    for prompt in ([], [7], list(range(3, 50))):
        layout = bench(family).family.layout(prompt, [], [])
        assert layout.ids == tuple(prompt)
        assert layout.spans == ()
        assert all(axis.tolist() == list(range(len(prompt))) for axis in layout.positions)
        assert layout.positions.dtype == np.int64
        assert layout.next_position == len(prompt)


@pytest.mark.parametrize(("family", "kind"), PAIRS)
def test_every_row_of_a_file_has_its_place(bench, family: str, kind: MediaKind) -> None:
    made = bench(family)
    placeholder = made.model.media_ids[kind]
    items = [ready(made, kind, number) for number in (1, 2, 3)]
    rows = made.encode(items)
    assert [tuple(each.shape) for each in rows] == [
        (item.meta.tokens, made.family.width) for item in items
    ]
    assert all(torch.isfinite(each).all() for each in rows)
    prompt = [5, placeholder, 6, placeholder, placeholder, 7]
    layout = made.family.layout(prompt, [1, 3, 4], [item.meta for item in items])
    assert layout.positions.shape[1] == len(layout.ids)
    assert layout.next_position == layout.positions.max() + 1
    assert [span.offset for span in layout.spans] == sorted(span.offset for span in layout.spans)
    assert all(a.offset + a.length <= b.offset for a, b in itertools.pairwise(layout.spans))
    for number, item in enumerate(items):
        own = [span for span in layout.spans if span.item == number]
        placed = sorted(row for span in own for row in range(span.row, span.row + span.length))
        assert placed == list(range(item.meta.tokens))


@pytest.mark.parametrize(("family", "kind"), PAIRS)
def test_the_place_of_a_file_is_all_that_was_written_for_it(
    bench, family: str, kind: MediaKind
) -> None:
    """By which a frontend makes the prompt that the model sees out of its own, and names blocks."""
    made = bench(family)
    placeholder = made.model.media_ids[kind]
    metas = [ready(made, kind, number).meta for number in (1, 2, 3)]
    prompt = (5, placeholder, 6, placeholder, placeholder, 7)
    items = tuple(MediaItem(kind, at, b"") for at in (1, 3, 4))
    layout = made.family.layout(prompt, [1, 3, 4], metas)
    work = Work("w", prompt, items, Sampling(seed=1))
    places = locate_media(layout, work, metas)
    assert [place.key for place in places] == [meta.key for meta in metas]
    rebuilt = list(prompt)
    for item, place in reversed(list(zip(items, places, strict=True))):
        rebuilt[item.at : item.at + 1] = place.ids or [placeholder] * place.length
    assert tuple(rebuilt) == layout.ids
    for span in layout.spans:
        place = places[span.item]
        assert place.start <= span.offset
        assert span.offset + span.length <= place.start + place.length
    assert all(place.ids for place in places) == ((family, kind) in WRITTEN_OUT)


@pytest.mark.parametrize(("family", "kind"), PAIRS)
def test_a_batch_of_many_shapes_equals_one_by_one(bench, family: str, kind: MediaKind) -> None:
    items = [ready(bench(family), kind, number) for number in (1, 2, 3)]
    together = bench(family).encode(items)
    for item, rows in zip(items, together, strict=True):
        [alone] = bench(family).encode([item])
        torch.testing.assert_close(rows, alone, atol=3e-5, rtol=1e-4)


@pytest.mark.parametrize(("family", "kind"), PAIRS)
async def test_answers_depend_on_the_file_and_where_it_stands(
    bench, family: str, kind: MediaKind
) -> None:
    made = bench(family)
    placeholder = made.model.media_ids[kind]
    items = [ready(made, kind, number) for number in (3, 2, 4, 6)]  # no noise: means hide it
    assert len({item.meta.key for item in items}) == len(items)
    before, after = list(range(150, 156)), list(range(160, 166))
    asked = [([*before, placeholder, *after], [item]) for item in items]
    asked.append(([placeholder, *before, *after], items[:1]))
    asked.append(([*before, placeholder, *after[:-1], 999], items[:1]))
    with made.engine() as engine:
        answers = [
            (await whole(engine, *made.ask(*each, max_tokens=8, ignore_eos=True))).ids
            for each in asked
        ]
    assert len({tuple(answer) for answer in answers}) == len(asked)
