"""Qwen2-Audio beside stock transformers: rows, expansion and tokens."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from jinja2 import Environment
from safetensors.torch import load_file, save_file
from transformers import Qwen2AudioProcessor, Qwen2TokenizerFast

import reference
from support import sounds
from support.mixed import Mixed
from support.stock_contract import check_prefill_and_decode_apart, check_tokens_and_logprobs
from support.torch_engine import whole
from triptych import models
from triptych.checkpoint import open_model
from triptych.engines.torch import weights
from triptych.errors import UnsupportedModel
from triptych.media import mel

# from three frames to the most there is; with 2,999 the convolutions reach the very end
SECONDS = (0.03, 0.51, 1.0, 3.3371, 7.77, 29.985, 30.0)


@pytest.fixture(scope="module")
def bench(benches) -> Mixed:
    return benches("qwen2_audio")


def stock_rows(bench: Mixed, waves: Sequence[np.ndarray]) -> list[torch.Tensor]:
    """What stock puts into the prompt: it has no call for that, so its projector is watched."""
    model, made = reference.stock_model(bench.folder), []
    watch = model.model.multi_modal_projector.register_forward_hook(
        lambda module, given, rows: made.append(rows)
    )
    inputs = sounds.stock_inputs(bench.folder, waves)
    lengths = [mel.token_count(int(mask.sum())) for mask in inputs["feature_attention_mask"]]
    ids = torch.tensor([[5, *[bench.model.media_ids["audio"]] * sum(lengths), 6]])
    with torch.inference_mode():
        model(input_ids=ids, attention_mask=torch.ones_like(ids), **inputs)
    watch.remove()
    return [rows[:length] for rows, length in zip(made[0], lengths, strict=True)]


def test_sounds_of_all_lengths_in_one_batch_are_encoded_as_stock_does(bench: Mixed) -> None:
    waves = [sounds.wave(number, length) for number, length in enumerate(SECONDS)]
    recipe = bench.family.recipes.audio
    items = [sounds.with_stock_spectrum(bench.folder, wave, recipe) for wave in waves]
    together = bench.encode(items)
    for wave, item, rows in zip(waves, items, together, strict=True):
        [alone], [stock] = bench.encode([item]), stock_rows(bench, [wave])
        assert rows.shape == (item.meta.tokens, bench.family.width)
        torch.testing.assert_close(rows, alone, atol=1e-5, rtol=0)
        torch.testing.assert_close(rows, stock, atol=1e-5, rtol=0)


def test_a_long_sound_does_not_pad_many_short_ones(bench: Mixed) -> None:
    waves = [sounds.wave(number, 0.2 + number % 3) for number in range(9)] + [sounds.wave(9, 20.0)]
    items = [sounds.prepared(wave, bench.family.recipes.audio) for wave in waves]
    seen: list[torch.Size] = []
    watch = bench.tower.register_forward_pre_hook(lambda module, given: seen.append(given[0].shape))
    rows = bench.encode(items)
    watch.remove()
    assert [len(each) for each in rows] == [item.meta.tokens for item in items]
    assert len(seen) == 3  # 20 s; 2.2 and 1.2 s; 0.2 s
    assert sum(shape[0] * shape[2] for shape in seen) < 2 * sum(item.cost + 2 for item in items)


@pytest.mark.parametrize("seconds", SECONDS)
def test_the_spectrum_reaches_beyond_the_end_as_stock_sees_it(bench: Mixed, seconds) -> None:
    wave, recipe = sounds.wave(3, seconds), bench.family.recipes.audio
    stock = sounds.stock_inputs(bench.folder, [wave])
    frames = int(stock["feature_attention_mask"].sum())
    spectrum = mel.mel_spectrum(wave, recipe)
    assert spectrum.shape == (128, frames + recipe.tail)
    theirs = stock["input_features"][0, :, : frames + recipe.tail].numpy()
    np.testing.assert_allclose(spectrum[:, : theirs.shape[1]], theirs, atol=1e-4)


def test_the_frames_after_the_end_matter(bench: Mixed) -> None:
    item = sounds.prepared(sounds.wave(0, 0.5), bench.family.recipes.audio)
    [spectrum] = item.arrays
    values = np.frombuffer(spectrum.buffer, np.float32).reshape(spectrum.shape).copy()
    values[:, -2:] = 0
    cut = type(item)(
        item.meta, (type(spectrum)(memoryview(values.tobytes()), "float32", values.shape),), 1
    )
    [whole_rows], [cut_rows] = bench.encode([item]), bench.encode([cut])
    assert (whole_rows - cut_rows).abs().max() > 1e-2


def test_placeholders_expand_as_stock_does(bench: Mixed) -> None:
    stock = Qwen2AudioProcessor(
        sounds.extractor(bench.folder), Qwen2TokenizerFast.from_pretrained(bench.folder)
    )
    words = "One: <|audio_bos|><|AUDIO|><|audio_eos|>, two: <|audio_bos|><|AUDIO|><|audio_eos|>."
    waves = [sounds.wave(1, 0.77), sounds.wave(2, 2.5)]
    theirs = stock(text=words, audio=waves, sampling_rate=16_000)["input_ids"][0]
    prompt = stock.tokenizer(words)["input_ids"]
    metas = [sounds.prepared(wave, bench.family.recipes.audio).meta for wave in waves]
    layout = bench.family.layout(prompt, bench.places(prompt), metas)
    assert list(layout.ids) == theirs
    assert layout.positions.tolist() == [list(range(len(theirs)))]
    assert layout.next_position == len(theirs)
    assert [(span.item, span.length, span.row) for span in layout.spans] == [
        (0, metas[0].tokens, 0),
        (1, metas[1].tokens, 0),
    ]


def test_the_template_writes_what_the_stock_processors_own_does(bench: Mixed) -> None:
    """Published checkpoints bring none that knows sounds."""
    ours = (bench.folder / "chat_template.jinja").read_text()
    theirs = Qwen2AudioProcessor.default_chat_template.fget(None)
    heard = {"type": "audio"}
    told = [{"type": "text", "text": "What's that?"}]
    chats = (
        [{"role": "user", "content": "Hello"}],
        [{"role": "system", "content": "Be short."}, {"role": "user", "content": [heard, *told]}],
        [
            {"role": "user", "content": [*told, heard]},
            {"role": "assistant", "content": "Glass."},
            {"role": "user", "content": [heard, heard, *told]},
        ],
    )
    for chat in chats:
        for more in (False, True):
            texts = [
                Environment().from_string(each).render(messages=chat, add_generation_prompt=more)
                for each in (ours, theirs)
            ]
            assert texts[0] == texts[1]


# words and sounds: a letter is two words, a digit a sound as long as that of SECONDS
PROMPTS = ("aaaa", "a2aa", "1a", "a0a1a", "a3a1aa2a", "22a", "a4", "aaaaaa6a")


def asked(bench: Mixed, letters: str, seed: int = 0) -> tuple[list[int], list[Any], dict[str, Any]]:
    """Prompt, items in its order, and stock inputs."""
    prompt, waves = [7], []
    for at, letter in enumerate(letters):
        if letter.isdigit():
            waves.append(sounds.wave(seed + int(letter), SECONDS[int(letter)]))
            prompt += [98, bench.model.media_ids["audio"], 99]
        else:
            prompt += [100 + at, 200 + 7 * at]
    items = [sounds.prepared(wave, bench.family.recipes.audio) for wave in waves]
    return prompt, items, sounds.stock_inputs(bench.folder, waves)


@pytest.fixture(scope="module")
def answered(bench: Mixed) -> list[tuple[Any, Any, reference.Reference]]:
    found = []
    for letters in PROMPTS:
        prompt, items, inputs = asked(bench, letters)
        found.append((prompt, items, bench.expect(prompt, items, inputs)))
    return found


@pytest.mark.parametrize("settings", [{}, {"step_tokens": 48, "block_size": 4}], ids=str)
async def test_tokens_and_logprobs_are_those_of_stock(bench, answered, settings) -> None:
    await check_tokens_and_logprobs(bench, answered, 1e-3, **settings)


async def test_prefill_and_decode_apart_give_the_same(bench, answered) -> None:
    await check_prefill_and_decode_apart(bench, answered)


async def test_another_sound_gives_another_answer_at_once(bench: Mixed) -> None:
    prompt, _, _ = asked(bench, "aa2aa")
    waves = [sounds.wave(seed, 1.0) for seed in range(24)]
    items = [sounds.prepared(wave, bench.family.recipes.audio) for wave in waves]
    with bench.engine() as engine:
        works = [bench.ask(prompt, [item], max_tokens=3) for item in items]
        answers = await asyncio.gather(*[whole(engine, *work) for work in works])
    assert len({tuple(answer.ids) for answer in answers}) > 20
    assert len({answer.ids[0] for answer in answers}) > 6


def test_answers_wander_and_are_far_from_ties(bench: Mixed, answered) -> None:
    gaps = sorted(gap for _, _, expected in answered for gap in expected.gaps)
    assert gaps[len(gaps) // 50] > 1e-3
    assert gaps[len(gaps) // 2] > 0.3
    assert sorted(len(set(expected.ids)) for _, _, expected in answered)[3] > 6


@pytest.mark.parametrize(
    ("stored", "part", "name"),
    [
        ("audio_tower.conv1.weight", "encoder", "audio_tower.conv1.weight"),
        ("model.audio_tower.conv1.weight", "encoder", "audio_tower.conv1.weight"),
        ("multi_modal_projector.linear.bias", "encoder", "multi_modal_projector.linear.bias"),
        ("language_model.lm_head.weight", "language", "lm_head.weight"),
        ("language_model.model.norm.weight", "language", "model.norm.weight"),
        ("language_model.model.model.norm.weight", "language", "model.norm.weight"),
        ("model.language_model.norm.weight", "language", "model.norm.weight"),
        ("lm_head.weight", "language", "lm_head.weight"),
    ],
)
def test_published_and_saved_names(bench: Mixed, stored: str, part: str, name: str) -> None:
    assert bench.family.weight_name(stored) == (part, name)


def test_a_checkpoint_with_names_as_transformers_saves_them_is_loaded(
    bench: Mixed, tmp_path: Path
) -> None:
    shutil.copytree(bench.folder, tmp_path / "saved")
    tensors = load_file(bench.folder / "model.safetensors")
    renamed = {
        name.replace("language_model.model.", "language_model.model.model."): value
        for name, value in tensors.items()
    }
    assert renamed.keys() != tensors.keys()
    save_file(renamed, tmp_path / "saved" / "model.safetensors")
    model = open_model(tmp_path / "saved")
    again = weights.load_part(models.find_family(model), model, "language", "cpu", torch.float32)
    for name, value in bench.module.state_dict().items():
        assert torch.equal(value, again.state_dict()[name])


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"feature_size": 80}, "80 mels"),
        ({"chunk_length": 10}, "1000 frames"),
        ({"dither": 1e-4}, "dither"),
    ],
)
def test_settings_that_would_silently_differ_are_refused(
    bench: Mixed, tmp_path: Path, change: dict[str, Any], reason: str
) -> None:
    shutil.copytree(bench.folder, tmp_path / "other")
    path = tmp_path / "other" / "preprocessor_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(UnsupportedModel, match=reason):
        models.find_family(open_model(tmp_path / "other"))
