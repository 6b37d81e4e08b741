"""Qwen2-VL, Qwen2.5-VL and Qwen3-VL: pictures and videos, alone and mixed, as stock has them."""

from __future__ import annotations

import asyncio
import itertools
import json
import random
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from PIL import Image
from tokenizers import Tokenizer
from tools import tiny
from transformers.models.qwen3_vl.processing_qwen3_vl import Qwen3VLProcessor

import reference
from support import pictures
from support.mixed import Mixed, ready
from support.torch_engine import prepared, settled, split, whole
from triptych import models
from triptych.checkpoint import open_model
from triptych.engines.torch import weights
from triptych.errors import UnsupportedModel
from triptych.media.base import PreparedMedia
from triptych.messages import MediaMeta
from triptych.models import qwen_vl
from triptych.models.tensors import tensor_view

FAMILIES = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl")
TIGHT = {"step_tokens": 24, "kv_blocks": 96, "block_size": 4, "max_running": 8}


@pytest.fixture(scope="module", params=FAMILIES)
def bench(request, benches) -> Mixed:
    return benches(request.param)


def clip(bench: Mixed, index: int) -> PreparedMedia:
    """The clip of this number, as the decode pool gives it: 2 to 4 moments."""
    rng = np.random.default_rng(index)
    moments, rows, columns = (int(n) for n in rng.integers((2, 1, 1), (5, 4, 4)))
    unit = 2 * bench.family.recipes.video.patch
    pixels = rng.integers(0, 256, (2 * moments, rows * unit, columns * unit, 3), np.uint8)
    start = 0.0 if bench.model.family != "qwen3_vl" else 0.3
    times = tuple(start + moment * (1.07 + index % 3) for moment in range(moments))
    meta = MediaMeta(
        b"", moments * rows * columns, (moments, 2 * rows, 2 * columns), "video", times
    )
    return ready(meta, pixels, 4 * meta.tokens)


def pixels(item: PreparedMedia) -> tuple[np.ndarray, tuple[float, ...]]:
    return tensor_view(item.arrays[0]).numpy(), item.meta.times


@dataclass(frozen=True)
class Request:
    prompt: list[int]
    items: list[PreparedMedia]
    inputs: dict[str, Any]  # stock


def request(bench: Mixed, seed: int) -> Request:
    """Words with up to two pictures and two clips among them, in any order."""
    draw = random.Random(seed)
    kinds = ["image"] * (seed % 3) + ["video"] * (seed // 3 % 3)
    draw.shuffle(kinds)
    prompt = [draw.randrange(100, 300) for _ in range(draw.randint(2, 12))]
    items, shown, shot = [], [], []
    for number, kind in enumerate(kinds):
        index = 4 * seed + number
        if kind == "image":
            shown.append(pictures.draw(index, 60 + index % 50, 90))
            items.append(prepared(bench.family.recipes.image, shown[-1]))
        else:
            items.append(clip(bench, index))
            shot.append(pixels(items[-1]))
        start, end = (bench.model.config[f"vision_{side}_token_id"] for side in ("start", "end"))
        prompt += [start, bench.model.media_ids[kind], end]
        prompt += [draw.randrange(100, 300) for _ in range(draw.randint(0, 9))]
    inputs = reference.image_inputs(bench.folder, shown)
    if shot:
        inputs |= reference.video_inputs(bench.folder, shot)
    return Request(prompt, items, inputs)


@pytest.fixture(scope="module")
def asked(bench):
    """Requests with every mixture, and what transformers answers."""
    made = [request(bench, seed) for seed in range(1, 11)]
    return [(r, bench.expect(r.prompt, r.items, r.inputs)) for r in made]


def test_rows_of_videos_equal_stock_bit_for_bit(bench: Mixed) -> None:
    items = [clip(bench, index) for index in range(4)]
    stock = reference.video_features(bench.folder, [pixels(item) for item in items])
    for mine, theirs in zip(bench.encode(items), stock, strict=True):
        assert mine.shape[1] == bench.family.width
        assert torch.equal(mine, theirs)


def test_rows_of_pictures_equal_stock_bit_for_bit(bench: Mixed) -> None:
    shown: list[Image.Image] = [pictures.draw(index) for index in range(4)]
    items = [prepared(bench.family.recipes.image, picture) for picture in shown]
    stock = reference.image_features(bench.folder, shown)
    for mine, theirs in zip(bench.encode(items), stock, strict=True):
        assert torch.equal(mine, theirs)


@pytest.mark.parametrize("seed", range(9))
def test_positions_equal_stock(bench: Mixed, seed: int) -> None:
    made = request(bench, seed)
    metas = [item.meta for item in made.items]
    layout = bench.family.layout(made.prompt, bench.places(made.prompt), metas)
    ids = torch.tensor([layout.ids])
    grids = {name: made.inputs[name] for name in made.inputs if not name.startswith("pixel")}
    stock, _ = reference.stock_model(bench.folder).model.get_rope_index(
        ids, mm_token_type_ids=reference.token_types(bench.folder, ids), **grids
    )
    assert np.array_equal(layout.positions, stock[:, 0])
    assert layout.next_position == stock[0, 0, -1].item() + 1  # as ``generate`` counts on


def test_every_row_stands_once_and_in_order(bench: Mixed) -> None:
    made = request(bench, 8)
    metas = [item.meta for item in made.items]
    layout = bench.family.layout(made.prompt, bench.places(made.prompt), metas)
    placeholders = set(bench.model.media_ids.values())
    stand = [at for span in layout.spans for at in range(span.offset, span.offset + span.length)]
    assert stand == [at for at, id in enumerate(layout.ids) if id in placeholders]
    for item, meta in enumerate(metas):
        spans = [span for span in layout.spans if span.item == item]
        assert [span.row for span in spans] == [
            sum(span.length for span in spans[:at]) for at in range(len(spans))
        ]
        assert sum(span.length for span in spans) == meta.tokens
        apart = bench.model.family == "qwen3_vl" and meta.kind == "video"
        assert len(spans) == (meta.grid[0] if apart else 1)


def test_a_long_clips_seconds_are_rounded_as_in_stock(benches) -> None:
    bench = benches("qwen2_5_vl")
    model = reference.stock_model(bench.folder).model
    token = bench.model.media_ids["video"]
    for step in (1 / 3, 0.7, 1.001, 2 / 1.9):
        times = tuple(step * moment for moment in range(300))
        meta = MediaMeta(b"", 300, (300, 2, 2), "video", times)
        layout = bench.family.layout([5, token, 6], [1], [meta])
        ids = torch.tensor([layout.ids])
        stock, _ = model.get_rope_index(
            ids,
            mm_token_type_ids=2 * (ids == token).int(),
            video_grid_thw=torch.tensor([[300, 2, 2]]),
            second_per_grid_ts=torch.tensor([step]),
        )
        assert np.array_equal(layout.positions, stock[:, 0])


def test_a_stamped_video_is_written_as_the_stock_processor_writes_it(benches) -> None:
    """The whole text in one go gives the same ids as its pieces."""
    folder = benches("qwen3_vl").folder
    model = open_model(folder)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    processor = SimpleNamespace(
        video_processor=SimpleNamespace(merge_size=2, temporal_patch_size=2),
        video_token="<|video_pad|>",
        image_token=None,
        all_special_multimodal_tokens=["<|video_pad|>"],
        vision_start_token="<|vision_start|>",
        vision_end_token="<|vision_end|>",
    )
    processor._calculate_timestamps = lambda *given: Qwen3VLProcessor._calculate_timestamps(
        processor, *given
    )
    indices, fps = [0, 13, 27, 40, 53], 24.0
    written = Qwen3VLProcessor.replace_video_token(
        processor,
        {
            "video_grid_thw": np.array([[3, 4, 6]]),
            "video_metadata": [SimpleNamespace(fps=fps, frames_indices=list(indices))],
        },
        0,
    )
    indices.append(indices[-1])
    times = tuple((a / fps + b / fps) / 2 for a, b in zip(indices[::2], indices[1::2], strict=True))
    meta = MediaMeta(b"", 18, (3, 4, 6), "video", times)
    for before, after in (("Look.", "!"), ("a<", ">"), ("7\n", "\n"), ("", "")):
        text = f"{before}<|vision_start|><|video_pad|><|vision_end|>{after}"
        [stock], _ = Qwen3VLProcessor.get_text_with_replacements(
            processor, [text], videos_replacements=[written]
        )
        prompt = tokenizer.encode(text, add_special_tokens=False).ids
        at = prompt.index(model.media_ids["video"])
        layout = models.find_family(model).layout(prompt, [at], [meta])
        assert list(layout.ids) == tokenizer.encode(stock, add_special_tokens=False).ids


def test_the_tokenizer_is_read_with_the_language_model_and_not_for_the_first_video(
    tmp_path: Path, monkeypatch
) -> None:
    model = open_model(tiny.make_checkpoint("qwen3_vl", tmp_path / "tiny"))
    read: list[str] = []

    def reading(file: str) -> Tokenizer:
        read.append(file)
        return Tokenizer.from_file(file)

    monkeypatch.setattr(qwen_vl, "Tokenizer", SimpleNamespace(from_file=reading))
    family = models.find_family(model)
    assert read == []  # all that a worker needs that encodes
    family.language(weights.load_part(family, model, "language", "cpu", torch.float32))
    assert len(read) == 1
    meta = MediaMeta(b"", 4, (1, 4, 4), "video", (0.5,))
    family.layout([1, model.media_ids["video"]], [1], [meta])
    assert len(read) == 1


@pytest.mark.parametrize("settings", [{}, {"step_tokens": 7, "block_size": 4}, TIGHT], ids=str)
async def test_greedy_tokens_and_logprobs_are_those_of_transformers(bench, asked, settings):
    """Chunks of seven tokens cut through every picture and every moment."""
    with bench.engine(**settings) as engine:
        works = [bench.ask(r.prompt, r.items, logprobs=1) for r, _ in asked]
        answers = await asyncio.gather(*[whole(engine, *work) for work in works])
        for answer, (_, expected) in zip(answers, asked, strict=True):
            assert answer.ids == expected.ids
            found = [value.logprob for value in answer.logprobs]
            assert found == pytest.approx(expected.logprobs, abs=1e-4)
        assert await settled(engine)


async def test_prefill_and_decode_apart_give_the_same(bench, asked):
    with bench.engine(**TIGHT) as one, bench.engine(**TIGHT) as two:
        works = [bench.ask(r.prompt, r.items) for r, _ in asked]
        answers = await asyncio.gather(*[split(one, two, *work) for work in works])
        assert [a.ids for a in answers] == [expected.ids for _, expected in asked]
        assert await settled(one)
        assert await settled(two)


async def test_a_video_is_found_in_the_prefix_cache_by_other_requests(bench, asked):
    made, _ = next((r, e) for r, e in asked if r.items and r.items[0].meta.kind == "video")
    with bench.engine(block_size=4) as engine:
        first = await whole(engine, *bench.ask(made.prompt, made.items))
        grown = [*made.prompt, 150, 151]
        again = await whole(engine, *bench.ask(grown, made.items))
        assert again.deltas[0].prompt.cached == first.deltas[0].prompt.tokens // 4 * 4
        assert again.ids == bench.expect(grown, made.items, made.inputs).ids
        # The same pixels shown at other times are another video.
        meta = made.items[0].meta
        late = msgspec.structs.replace(
            meta, times=tuple(2 * time + 0.4 for time in meta.times), key=b"l" * 32
        )
        moved = [PreparedMedia(late, made.items[0].arrays, made.items[0].cost), *made.items[1:]]
        other = await whole(engine, *bench.ask(made.prompt, moved))
        start = made.prompt.index(bench.model.media_ids["video"])
        assert other.deltas[0].prompt.cached <= start + 8


@pytest.mark.parametrize("after", [[], [160, 161]], ids=["at_the_end", "words_after"])
async def test_the_next_turn_finds_an_answer_only_where_it_stands_at_the_same_positions(
    bench, after
):
    """Right after a video, what is generated may stand further on than the same words given."""
    unit = 2 * bench.family.recipes.video.patch
    shot = np.random.default_rng(5).integers(0, 256, (8, unit, unit, 3), np.uint8)
    item = ready(MediaMeta(b"", 4, (4, 2, 2), "video", (0.0, 2.0, 4.0, 6.0)), shot)
    inputs = reference.video_inputs(bench.folder, [pixels(item)])
    prompt = [120, 121, bench.model.media_ids["video"], *after]
    with bench.engine(block_size=4) as engine:
        answer = await whole(engine, *bench.ask(prompt, [item], ignore_eos=True))
        grown = [*prompt, *answer.ids, 150]
        again = await whole(engine, *bench.ask(grown, [item]))
    before, then = (bench.family.layout(p, [2], [item.meta]) for p in (prompt, grown))
    known = len(before.ids)
    same = before.next_position == int(then.positions[0, known])
    assert same == (bool(after) or bench.model.family == "qwen3_vl")
    known += (len(answer.ids) - 1) * same
    assert again.deltas[0].prompt.cached == known // 4 * 4
    assert again.ids == bench.expect(grown, [item], inputs).ids


async def test_sequences_can_be_moved_out_amid_their_media(bench, asked):
    draw, moved = random.Random(3), 0
    with bench.engine(block_size=4, step_tokens=12) as engine:
        scheduler, schedule = engine._scheduler, engine._scheduler.schedule

        def disturbed():
            nonlocal moved
            amid = [s for s in scheduler.running if s.media and 0 < s.computed < s.prompt]
            if amid and draw.random() < 0.4:
                scheduler._preempt(draw.choice(amid))
                moved += 1
            return schedule()

        scheduler.schedule = disturbed
        works = [bench.ask(r.prompt, r.items) for r, _ in asked]
        answers = await asyncio.gather(*[whole(engine, *work) for work in works])
        assert await settled(engine)
    assert moved > 3
    assert [a.ids for a in answers] == [expected.ids for _, expected in asked]


def test_answers_depend_on_every_moment_of_a_video(bench: Mixed) -> None:
    start, end = (bench.model.config[f"vision_{side}_token_id"] for side in ("start", "end"))
    prompt = [120, start, bench.model.media_ids["video"], end, 130, 131]

    def answer(item: PreparedMedia) -> reference.Reference:
        inputs = reference.video_inputs(bench.folder, [pixels(item)])
        return bench.expect(prompt, [item], inputs)

    given = [answer(clip(bench, index)) for index in range(12)]
    pairs = list(itertools.combinations([one.ids[:4] for one in given], 2))
    assert sum(a != b for a, b in pairs) > 0.95 * len(pairs)
    assert min(gap for one in given for gap in one.gaps) > 1e-4
    same = 0
    for index in range(4):
        item = clip(bench, index)
        for moment in range(item.meta.grid[0]):
            seen = pixels(item)[0].copy()
            seen[2 * moment : 2 * moment + 2] = 255 - seen[2 * moment : 2 * moment + 2]
            same += answer(ready(item.meta, seen)).ids[:8] == given[index].ids[:8]
    assert same <= 1
    if bench.model.family != "qwen2_vl":  # it does not know seconds
        slow = msgspec.structs.replace(item.meta, times=tuple(3 * t for t in item.meta.times))
        assert answer(ready(slow, pixels(item)[0])).ids[:8] != given[3].ids[:8]


def test_what_deepstack_layers_add_matters(benches) -> None:
    bench = benches("qwen3_vl")
    hidden = bench.language.hidden
    assert bench.language.deepstack == 2
    made = request(bench, 4)
    work, media = bench.ask(made.prompt, made.items)

    async def answers() -> list[list[int]]:
        with bench.engine(prefix_cache=False) as engine:
            full = await whole(engine, work, media)
            for item in media:
                tensor_view(item.arrays[0])[:, hidden:] = 0
            return [full.ids, (await whole(engine, work, media)).ids]

    for item in media:  # a copy that can be written to
        array = item.arrays[0]
        object.__setattr__(array, "buffer", memoryview(bytearray(array.buffer)))
    full, plain = asyncio.run(answers())
    assert full[:8] != plain[:8]


def test_experts_are_refused_with_the_reason(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "qwen3_vl_moe", "vocab_size": 9}')
    with pytest.raises(UnsupportedModel, match=r"mixture of experts.*dense"):
        models.find_family(open_model(tmp_path))


def test_a_video_processor_unlike_the_tower_is_refused(tmp_path: Path) -> None:
    folder = tiny.make_checkpoint("qwen2_vl", tmp_path / "tiny")
    file = folder / "video_preprocessor_config.json"
    settings = json.loads(file.read_text())
    file.write_text(json.dumps(settings | {"temporal_patch_size": 1}))
    with pytest.raises(UnsupportedModel, match="video processor's patch"):
        models.find_family(open_model(folder))
    for given in ({"cap_pixels_per_frame": True}, {"num_frames": 8}):
        file.write_text(json.dumps(settings | given))
        with pytest.raises(UnsupportedModel, match=next(iter(given))):
            models.find_family(open_model(folder))
