"""Qwen2.5-Omni's thinker beside stock transformers: rows, expansion, positions and tokens."""

from __future__ import annotations

import asyncio
import hashlib
import json
import re
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from jinja2 import Environment
from msgspec.structs import replace
from tokenizers import Tokenizer
from transformers import Qwen2_5OmniProcessor

import reference
from support import clips, pictures, sounds
from support.mixed import Mixed
from support.stock_contract import check_prefill_and_decode_apart, check_tokens_and_logprobs
from support.torch_engine import frozen, prepared, whole
from triptych import models
from triptych.checkpoint import open_model
from triptych.config import Limits
from triptych.engines.torch import weights
from triptych.errors import UnsupportedModel
from triptych.media import audio
from triptych.media.base import PreparedMedia
from triptych.media.prepare import prepare
from triptych.messages import MediaMeta
from triptych.models.tensors import tensor_view

SECONDS = (0.51, 1.0, 2.0, 3.3371, 4.02, 7.77)
TEXTS = {  # a picture, a silent clip, a clip with sound, a sound
    "I": "<|vision_bos|><|IMAGE|><|vision_eos|>",
    "V": "<|vision_bos|><|VIDEO|><|vision_eos|>",
    "S": "<|vision_bos|><|VIDEO|><|vision_eos|>",
    "A": "<|audio_bos|><|AUDIO|><|audio_eos|>",
}


@pytest.fixture(scope="module")
def bench(benches) -> Mixed:
    return benches("qwen2_5_omni")


def wave(number: int) -> np.ndarray:
    return sounds.wave(number, SECONDS[number % len(SECONDS)])


def sound(bench: Mixed, number: int) -> PreparedMedia:
    return sounds.prepared(wave(number), bench.family.recipes.audio)


def picture(bench: Mixed, number: int) -> PreparedMedia:
    return prepared(bench.family.recipes.image, pictures.draw(number))


def clip(bench: Mixed, number: int, *, heard: bool = False) -> PreparedMedia:
    """A clip of 1 to 6 moments, a second each; its sound may end long before or after it."""
    rng = np.random.default_rng(number)
    moments, rows, columns = 1 + number % 6, *(int(n) for n in rng.integers(1, 4, 2))
    pixels = rng.integers(0, 256, (2 * moments, 28 * rows, 28 * columns, 3), np.uint8)
    track = [sound(bench, number + 2)] if heard else []
    arrays = (frozen(torch.from_numpy(pixels)), *(item.arrays[0] for item in track))
    heard_rows = sum(item.meta.tokens for item in track)
    meta = MediaMeta(
        hashlib.sha256(b"".join(bytes(array.buffer) for array in arrays)).digest(),
        moments * rows * columns + heard_rows,
        (moments, 2 * rows, 2 * columns),
        "video",
        audio_tokens=heard_rows,
    )
    return PreparedMedia(meta, arrays, 1)


@dataclass(frozen=True)
class Request:
    text: str
    prompt: list[int]
    items: list[PreparedMedia]
    inputs: dict[str, Any]  # stock


def request(bench: Mixed, letters: str, start: int = 0) -> Request:
    """Turns that a slash parts: words for small letters, media for large ones, from ``start``."""
    items: list[PreparedMedia] = []
    waves: list[np.ndarray] = []
    shown: list[Any] = []
    text = ""
    for role, turn in enumerate(letters.split("/")):
        text += f"<|im_start|>{('user', 'assistant')[role % 2]}\n"
        for letter in turn:
            number = start + len(items)
            text += TEXTS.get(letter, f" {letter} word")
            if letter == "I":
                items.append(picture(bench, number))
                shown.append(pictures.draw(number))
            elif letter == "A":
                items.append(sound(bench, number))
                waves.append(wave(number))
            elif letter in "VS":
                items.append(clip(bench, number, heard=letter == "S"))
                waves += [wave(number + 2)] if letter == "S" else []
        text += "<|im_end|>\n"
    tokenizer = Tokenizer.from_file(str(bench.folder / "tokenizer.json"))
    inputs = reference.image_inputs(bench.folder, shown) | sounds.stock_inputs(bench.folder, waves)
    inputs |= seen([item for item in items if item.meta.kind == "video"], bench.folder)
    if "S" in letters:
        inputs["use_audio_in_video"] = True
    return Request(text, tokenizer.encode(text).ids, items, inputs)


def seen(shot: Sequence[PreparedMedia], folder: Path) -> dict[str, Any]:
    if not shot:
        return {}
    frames = [(tensor_view(item.arrays[0]).numpy(), ()) for item in shot]
    inputs = reference.video_inputs(folder, frames)
    return inputs | {"video_second_per_grid": torch.ones(len(shot))}


def test_sounds_of_all_lengths_in_one_batch_are_encoded_as_stock_does(bench: Mixed) -> None:
    waves = [sounds.wave(0, 0.03), sounds.wave(1, 29.985), *(wave(number) for number in range(6))]
    recipe = bench.family.recipes.audio
    items = [sounds.with_stock_spectrum(bench.folder, each, recipe) for each in waves]
    inputs = sounds.stock_inputs(bench.folder, waves)
    with torch.inference_mode():
        stock = reference.stock_model(bench.folder).get_audio_features(**inputs).last_hidden_state
    together = bench.encode(items)
    assert torch.equal(torch.cat(together), stock)
    for item, rows in zip(items, together, strict=True):
        [alone] = bench.encode([item])
        assert len(rows) == item.meta.tokens
        torch.testing.assert_close(rows, alone, atol=1e-5, rtol=0)


def test_pictures_and_clips_are_encoded_as_stock_does(bench: Mixed) -> None:
    numbers = range(5)
    shown = reference.image_features(bench.folder, [pictures.draw(number) for number in numbers])
    for ours, theirs in zip(bench.encode([picture(bench, n) for n in numbers]), shown, strict=True):
        assert torch.equal(ours, theirs)
    items = [clip(bench, number) for number in numbers]
    inputs = seen(items, bench.folder)
    del inputs["video_second_per_grid"]
    with torch.inference_mode():
        stock = reference.stock_model(bench.folder).get_video_features(**inputs).pooler_output
    for ours, theirs in zip(bench.encode(items), stock, strict=True):
        assert torch.equal(ours, theirs)


def test_a_clips_sound_comes_after_its_frames(bench: Mixed) -> None:
    with_sound = [clip(bench, 1, heard=True), clip(bench, 2), clip(bench, 3, heard=True)]
    rows = bench.encode(with_sound)
    frames = bench.encode([clip(bench, 1), clip(bench, 2), clip(bench, 3)])
    tracks = bench.encode([sound(bench, 3), sound(bench, 5)])
    torch.testing.assert_close(rows[0], torch.cat((frames[0], tracks[0])), atol=1e-5, rtol=0)
    torch.testing.assert_close(rows[1], frames[1], atol=1e-5, rtol=0)
    torch.testing.assert_close(rows[2], torch.cat((frames[2], tracks[1])), atol=1e-5, rtol=0)


# Every mixture that stock can take: there all clips of a prompt are heard, or none.
MIXED = (
    "aa",
    "aIb",
    "Va",
    "aAb",
    "aSb",
    "IAVa",
    "aIb/cc/AdVe/f/Ig",
    "VVa/b/AAcI",
    "SSa",
    "aIbS/cc/AdSe/f/SIg",
    "ASAaS",
)


def stock_expansion(bench: Mixed, made: Request) -> list[int]:
    processor = object.__new__(Qwen2_5OmniProcessor)  # building one needs torchvision
    processor.image_token, processor.video_token = "<|IMAGE|>", "<|VIDEO|>"
    processor.audio_token = "<|AUDIO|>"
    processor.vision_bos_token, processor.vision_eos_token = "<|vision_bos|>", "<|vision_eos|>"
    processor.audio_bos_token, processor.audio_eos_token = "<|audio_bos|>", "<|audio_eos|>"
    processor.image_processor = processor.video_processor = SimpleNamespace(merge_size=2)
    frames = made.inputs.get("feature_attention_mask", torch.empty(0, 1)).sum(-1).long()
    grids = {
        name: made.inputs.get(name, torch.empty(0, 3, dtype=torch.long)).numpy()
        for name in ("image_grid_thw", "video_grid_thw")
    }
    [text] = processor.replace_multimodal_special_tokens(
        [made.text],
        iter((((frames - 1) // 2 + 1 - 2) // 2 + 1).tolist()),
        iter(grids["image_grid_thw"]),
        iter(grids["video_grid_thw"]),
        video_second_per_grid=iter([1.0] * len(grids["video_grid_thw"])),
        use_audio_in_video="use_audio_in_video" in made.inputs,
        position_id_per_seconds=25,
        seconds_per_chunk=2.0,
    )
    return Tokenizer.from_file(str(bench.folder / "tokenizer.json")).encode(text).ids


@pytest.mark.parametrize("start", [0, 3])
@pytest.mark.parametrize("letters", MIXED)
def test_expansion_and_positions_equal_stock(bench: Mixed, letters: str, start: int) -> None:
    made = request(bench, letters, start)
    metas = [item.meta for item in made.items]
    layout = bench.family.layout(made.prompt, bench.places(made.prompt), metas)
    assert list(layout.ids) == stock_expansion(bench, made)
    ids = torch.tensor([layout.ids])
    masks = made.inputs.get("feature_attention_mask")
    stock, _ = reference.stock_model(bench.folder).get_rope_index(
        ids,
        image_grid_thw=made.inputs.get("image_grid_thw"),
        video_grid_thw=made.inputs.get("video_grid_thw"),
        attention_mask=torch.ones_like(ids),
        use_audio_in_video="use_audio_in_video" in made.inputs,
        audio_seqlens=None if masks is None else masks.sum(-1),
        second_per_grids=made.inputs.get("video_second_per_grid"),
    )
    assert layout.positions.dtype == np.int64
    assert np.array_equal(layout.positions, stock[:, 0])
    assert layout.next_position == stock[0, 0, -1] + 1  # as ``generate`` counts on


@pytest.mark.parametrize("moments", range(1, 7))
@pytest.mark.parametrize("heard", [1, 20, 49, 50, 51, 55, 100, 101, 160])
def test_frames_and_sound_take_turns_as_in_stock(bench: Mixed, moments: int, heard: int) -> None:
    """Whichever ends first, and whichever has the last turn."""
    config = bench.model.config["thinker_config"]
    markers = [config[f"vision_{side}_token_id"] for side in ("start", "end")]
    prompt = [7, markers[0], bench.model.media_ids["video"], markers[1], 8, 9]
    meta = MediaMeta(b"", moments * 6 + heard, (moments, 4, 6), "video", audio_tokens=heard)
    layout = bench.family.layout(prompt, [2], [meta])
    ids = torch.tensor([layout.ids])
    stock, _ = reference.stock_model(bench.folder).get_rope_index(
        ids,
        video_grid_thw=torch.tensor([meta.grid]),
        attention_mask=torch.ones_like(ids),
        use_audio_in_video=True,
        audio_seqlens=torch.tensor([4 * heard]),
        second_per_grids=torch.ones(1),
    )
    assert np.array_equal(layout.positions, stock[:, 0])
    assert layout.next_position == stock[0, 0, -1] + 1


def test_every_row_stands_once_where_its_kind_is_meant_to_be(bench: Mixed) -> None:
    made = request(bench, "aIbS/cc/AdVe/f/SIg")  # heard and silent clips, which stock cannot mix
    metas = [item.meta for item in made.items]
    layout = bench.family.layout(made.prompt, bench.places(made.prompt), metas)
    ids = bench.model.media_ids
    for item, meta in enumerate(metas):
        own = [span for span in layout.spans if span.item == item]
        rows = [row for span in own for row in range(span.row, span.row + span.length)]
        assert sorted(rows) == list(range(meta.tokens))
        assert len(own) == 1 or meta.audio_tokens
        for span in own:
            track = span.row >= meta.tokens - meta.audio_tokens
            expected = ids["audio"] if track and meta.kind == "video" else ids[meta.kind]
            stand = layout.ids[span.offset : span.offset + span.length]
            assert set(stand) == {expected}
    assert sum(span.length for span in layout.spans) == sum(meta.tokens for meta in metas)
    offsets = [span.offset for span in layout.spans]
    assert offsets == sorted(offsets)


@pytest.mark.parametrize(("samples", "rows"), [(0, 0), (320, 0), (321, 1), (16_000, 25)])
def test_a_track_too_short_for_a_row_is_silence(
    bench: Mixed, monkeypatch: pytest.MonkeyPatch, samples: int, rows: int
) -> None:
    track = sounds.wave(1, 1.0)[:samples] if samples else None
    monkeypatch.setattr(audio, "decode_audio", lambda *_: track)
    data = memoryview(clips.video(1, frames=20, fps=10))
    meta, arrays, _, _ = prepare("video", "file", data, bench.family.recipes, Limits(), False)
    assert meta.audio_tokens == rows
    assert meta.tokens == np.prod(meta.grid) // 4 + rows
    assert len(arrays) == (2 if rows else 1)


def test_a_clip_with_sound_without_markers_around_it_is_laid_out(bench: Mixed) -> None:
    meta = clip(bench, 4, heard=True).meta
    video = bench.model.media_ids["video"]
    layout = bench.family.layout([video], [0], [meta])
    assert len(layout.ids) == meta.tokens + 2
    assert layout.positions[0, 0] == 0


@pytest.fixture(scope="module")
def answered(bench: Mixed) -> list[tuple[Request, reference.Reference]]:
    made = [request(bench, letters, 2 * number) for number, letters in enumerate(MIXED)]
    return [(each, bench.expect(each.prompt, each.items, each.inputs)) for each in made]


@pytest.mark.parametrize("settings", [{}, {"step_tokens": 48, "block_size": 4}], ids=str)
async def test_tokens_and_logprobs_are_those_of_stock(bench, answered, settings) -> None:
    asked = [(made.prompt, made.items, expected) for made, expected in answered]
    await check_tokens_and_logprobs(bench, asked, 1e-3, **settings)


async def test_prefill_and_decode_apart_give_the_same(bench, answered) -> None:
    asked = [(made.prompt, made.items, expected) for made, expected in answered]
    await check_prefill_and_decode_apart(bench, asked)


@pytest.mark.parametrize("letter", ["A", "I", "V"])
async def test_other_media_give_another_answer_at_once(bench: Mixed, letter: str) -> None:
    make = {"A": sound, "I": picture, "V": clip}[letter]
    prompt = request(bench, f"a{letter}b").prompt
    items = [make(bench, 6 * number + 1) for number in range(12)]
    assert len({item.meta.grid for item in items}) < len(items)
    with bench.engine() as engine:
        works = [bench.ask(prompt, [item], max_tokens=3) for item in items]
        answers = await asyncio.gather(*[whole(engine, *work) for work in works])
    assert len({tuple(answer.ids) for answer in answers}) > 9


async def test_a_clips_sound_changes_the_answer(bench: Mixed) -> None:
    prompt = request(bench, "aVb").prompt
    mute, loud = clip(bench, 7), clip(bench, 7, heard=True)
    with bench.engine() as engine:
        works = [bench.ask(prompt, [item]) for item in (mute, loud)]
        first, second = await asyncio.gather(*[whole(engine, *work) for work in works])
    assert first.ids != second.ids


async def test_what_shares_a_position_is_not_found_where_it_has_its_own(bench: Mixed) -> None:
    """Words may hold the marker of sound that a clip's layout writes over the one of vision."""
    marks = bench.family.config
    words = [120, 121, marks.vision_start_token_id]
    heard = [*words, bench.model.media_ids["video"], marks.vision_end_token_id, 130]
    said = [*words, marks.audio_start_token_id, 130, 131]
    item = clip(bench, 7, heard=True)
    with bench.engine(block_size=4) as engine:
        for _ in range(2):
            first = await whole(engine, *bench.ask(heard, [item]))
        other = await whole(engine, *bench.ask(said, []))
    info = first.deltas[0].prompt
    assert info.cached == (info.tokens - 1) // 4 * 4
    assert info.ids[:4] == other.deltas[0].prompt.ids[:4]
    assert other.deltas[0].prompt.cached == 0
    assert other.ids == bench.expect(said, [], {}).ids


def test_answers_are_far_from_ties(answered) -> None:
    gaps = sorted(gap for _, expected in answered for gap in expected.gaps)
    assert gaps[len(gaps) // 50] > 1e-3
    assert gaps[len(gaps) // 2] > 0.3


@pytest.mark.parametrize(
    ("stored", "named"),
    [
        ("thinker.audio_tower.conv1.weight", ("encoder", "audio_tower.conv1.weight")),
        ("thinker.visual.merger.ln_q.weight", ("encoder", "visual.merger.ln_q.weight")),
        ("thinker.model.norm.weight", ("language", "model.norm.weight")),
        ("thinker.lm_head.weight", ("language", "lm_head.weight")),
        ("thinker.model.language_model.norm.weight", ("language", "model.norm.weight")),
        ("audio_tower.conv1.weight", ("encoder", "audio_tower.conv1.weight")),
        ("model.visual.merger.ln_q.weight", ("encoder", "visual.merger.ln_q.weight")),
        ("model.norm.weight", ("language", "model.norm.weight")),
        ("lm_head.weight", ("language", "lm_head.weight")),
        ("talker.model.norm.weight", None),
        ("token2wav.code2wav_dit_model.proj_out.bias", None),
    ],
)
def test_published_and_saved_names(bench: Mixed, stored: str, named: Any) -> None:
    assert bench.family.weight_name(stored) == named


def test_the_thinker_alone_is_loaded_too(bench: Mixed, tmp_path: Path) -> None:
    reference.stock_model(bench.folder).save_pretrained(tmp_path)
    for path in bench.folder.glob("*preprocessor_config.json"):
        shutil.copy(path, tmp_path)
    model = open_model(tmp_path)
    assert (bench.model.family, model.family) == ("qwen2_5_omni", "qwen2_5_omni_thinker")
    assert (model.media_ids, model.context) == (bench.model.media_ids, bench.model.context)
    for part, loaded in (("language", bench.module), ("encoder", bench.tower)):
        again = weights.load_part(models.find_family(model), model, part, "cpu", torch.float32)
        for name, value in loaded.state_dict().items():
            assert torch.equal(value, again.state_dict()[name])


def change(bench: Mixed, folder: Path, file: str, settings: dict[str, Any]) -> Any:
    shutil.copytree(bench.folder, folder / "other")
    path = folder / "other" / file
    path.write_text(json.dumps(json.loads(path.read_text()) | settings))
    return models.find_family(open_model(folder / "other"))


@pytest.mark.parametrize(
    ("file", "settings", "reason"),
    [
        ("preprocessor_config.json", {"feature_size": 80}, "80 mels"),
        ("preprocessor_config.json", {"patch_size": 16}, "patch and merge"),
        ("video_preprocessor_config.json", {"merge_size": 1}, "patch and merge"),
    ],
)
def test_settings_that_would_silently_differ_are_refused(
    bench: Mixed, tmp_path: Path, file: str, settings: dict[str, Any], reason: str
) -> None:
    with pytest.raises(UnsupportedModel, match=reason):
        change(bench, tmp_path, file, settings)


def test_sizes_of_pictures_are_not_those_of_videos(bench: Mixed, tmp_path: Path) -> None:
    """Published checkpoints have one file, which is about pictures; stock has its own limits."""
    shutil.copytree(bench.folder, tmp_path / "published")
    (tmp_path / "published" / "video_preprocessor_config.json").unlink()
    recipes = models.find_family(open_model(tmp_path / "published")).recipes
    assert (recipes.image.min_pixels, recipes.image.max_pixels) == (4 * 28**2, 256 * 28**2)
    assert (recipes.video.min_pixels, recipes.video.max_pixels) == (128 * 28**2, 768 * 28**2)
    assert recipes.video.with_audio


def test_positions_follow_the_rate_that_is_asked_for(bench: Mixed, tmp_path: Path) -> None:
    family = change(bench, tmp_path, "video_preprocessor_config.json", {"fps": 3.0})
    meta = clip(bench, 5).meta
    where = family.layout([bench.model.media_ids["video"]], [0], [meta]).positions
    assert np.unique(where[0]).tolist() == [0, 16, 33, 50, 66, 83]


def test_the_template_places_one_placeholder_for_each_item(bench: Mixed) -> None:
    template = Environment().from_string((bench.folder / "chat_template.jinja").read_text())
    kinds = ("image", "video", "audio")
    content = [*({"type": kind} for kind in kinds), {"type": "text", "text": "what?"}]
    text = template.render(
        messages=[{"role": "user", "content": content}], add_generation_prompt=True
    )
    assert re.findall(r"<\|(?:IMAGE|VIDEO|AUDIO)\|>", text) == [
        "<|IMAGE|>",
        "<|VIDEO|>",
        "<|AUDIO|>",
    ]
    assert text.endswith("what?<|im_end|>\n<|im_start|>assistant\n")


def test_a_frame_rate_of_the_request_sets_how_far_moments_lie_apart(bench: Mixed) -> None:
    """As in the stock processor: the temporal patch over the rate that is asked for."""
    meta = replace(clip(bench, 5).meta, interval=2 / 5.0)
    where = bench.family._grid_positions(meta)[0]
    rate = bench.family.config.position_id_per_seconds
    expected = [int(np.float32(moment) * np.float32(0.4) * rate) for moment in range(meta.grid[0])]
    assert sorted(set(where.tolist())) == expected
    plain = bench.family._grid_positions(replace(meta, interval=0.0))[0]
    assert plain.max() > where.max()
