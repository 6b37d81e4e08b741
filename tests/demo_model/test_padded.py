"""Training goes through code of its own: it must be the stock network, number for number."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from transformers import Qwen2_5OmniThinkerForConditionalGeneration as Thinker

from models.demo import batch as batches
from models.demo import network
from models.demo.batch import Batch, Prompt, Room, cut, fit, resized
from models.demo.padded import Padded
from models.demo.recipe.sample import Clip, Picture, Sample, Sound, Turn
from triptych.checkpoint import packaged_folder
from triptych.media import images
from triptych.media.mel import mel_spectrum
from triptych.recipe import MelAudio

RECIPE = MelAudio(16_000, 400, 160, network.MELS, network.SECONDS * 100)


def _turn(question: str, answer: str) -> Turn:
    return Turn("any", question, answer, ())


@pytest.fixture(scope="module")
def tokenizer():
    return network.read_tokenizer(packaged_folder("qwen_omni"))


@pytest.fixture(scope="module")
def samples() -> list[Sample]:
    rng = np.random.default_rng(5)

    def picture(height: int, width: int) -> Picture:
        return Picture(rng.integers(0, 256, (height, width, 3), np.uint8))

    clip = Clip(rng.integers(0, 256, (20, 112, 112, 3), np.uint8), 8.0)
    sound = Sound(rng.uniform(-0.3, 0.3, 37_123).astype(np.float32))
    short = Sound(rng.uniform(-0.3, 0.3, 9_999).astype(np.float32))
    both = (_turn("What is it?", "It is a cat."), _turn("Which colour?", "The cat is red."))
    return [
        Sample((picture(150, 210),), both, system="Be brief."),
        Sample((picture(168, 168), picture(300, 100)), both[:1]),
        Sample((clip,), both[:1]),
        Sample((sound,), both[1:]),
        Sample((picture(140, 140), short), both),
        Sample((), both),
    ]


@pytest.fixture(scope="module")
def parts(tokenizer):
    torch.manual_seed(3)
    parts = network.build(tokenizer).eval()
    for weight in parts.parameters():
        weight.data = weight.data.bfloat16().float()  # as they are saved
    return parts


@pytest.fixture(scope="module")
def thinker(parts, tokenizer, tmp_path_factory):
    """The stock class, from the files."""
    folder = tmp_path_factory.mktemp("saved")
    network.save(parts.state_dict(), tokenizer, folder)
    return Thinker.from_pretrained(folder, dtype=torch.float32).eval()


def _stock_positions(thinker, ids, seen):
    grids = {kind: [] for kind in (Picture, Clip)}
    frames = []
    for item in seen:
        moments, rows, columns = item.cells
        if isinstance(item.media, Sound):
            frames.append(-(-len(item.media.wave) // 160))
        else:
            grids[type(item.media)].append((moments, rows * 2, columns * 2))
    if not grids[Picture] and not grids[Clip]:
        return torch.arange(len(ids)).expand(3, 1, -1), grids
    positions, _ = thinker.get_rope_index(
        torch.tensor([ids]),
        torch.tensor(grids[Picture]) if grids[Picture] else None,
        torch.tensor(grids[Clip]) if grids[Clip] else None,
        torch.ones(1, len(ids), dtype=torch.long),
        False,
        torch.tensor(frames) if frames else None,
        torch.tensor([2 / network.FPS] * len(grids[Clip])),
    )
    return positions, grids


def _stock_logits(thinker, sample, seen, written):
    ids = written.ids
    positions, grids = _stock_positions(thinker, ids, seen)
    np.testing.assert_array_equal(positions[:, 0], np.concatenate(written.positions, axis=1))
    inputs = {"input_ids": torch.tensor([ids]), "position_ids": positions}
    mean, std = (torch.tensor(v).repeat_interleave(196) for v in (network.MEAN, network.STD))

    def toned(parts):
        return (torch.from_numpy(np.concatenate(parts)).float() / 255 - mean) / std

    pictures = [toned(item.parts) for item in seen if isinstance(item.media, Picture)]
    if pictures:
        once = torch.cat(pictures).view(-1, 3, 1, 196).expand(-1, -1, 2, -1)
        inputs["pixel_values"] = once.reshape(-1, 1176)
        inputs["image_grid_thw"] = torch.tensor(grids[Picture])
    for item in seen:
        if isinstance(item.media, Clip):
            moments = [
                torch.stack((toned([a]), toned([b])), 1).view(-1, 2, 3, 196).transpose(1, 2)
                for a, b in zip(item.parts[::2], item.parts[1::2], strict=True)
            ]
            inputs["pixel_values_videos"] = torch.cat(moments).reshape(-1, 1176)
            inputs["video_grid_thw"] = torch.tensor(grids[Clip])
        if isinstance(item.media, Sound):
            mel = torch.from_numpy(
                mel_spectrum(np.int16(item.media.wave * 32767) / np.float32(32767), RECIPE)
            )
            inputs["input_features"] = mel[None]
            inputs["feature_attention_mask"] = torch.ones(1, mel.shape[1], dtype=torch.long)
    return thinker(**inputs).logits[0]


def test_logits_equal_those_of_the_stock_network(parts, thinker, tokenizer, samples):
    prompt, batch = Prompt(tokenizer), Batch(Room(6, 4, 2, 2, 12, 200), ["any"])
    wanted = []
    with torch.no_grad():
        for number, sample in enumerate(samples):
            seen = [cut(media) for media in sample.media]
            written = prompt.of(sample, seen, text_first=number == 1)
            assert batch.add(sample, seen, written)
            logits = _stock_logits(thinker, sample, seen, written)
            for _, first, tokens in written.answers:
                wanted.append(logits[first - 1 : first - 1 + tokens])
        arrays = {name: torch.from_numpy(array) for name, array in batch.arrays().items()}
        given = Padded(parts)(arrays)[arrays["want"] >= 0]
    torch.testing.assert_close(given, torch.cat(wanted), rtol=0, atol=2e-4)
    assert given.std() > 0.1


def test_prompts_are_what_the_template_makes(tokenizer, samples):
    import jinja2

    template = jinja2.Template(network.TEMPLATE)
    for sample in samples:
        seen = [cut(media) for media in sample.media]
        kinds = {Picture: "image", Clip: "video", Sound: "audio"}
        messages = [{"role": "system", "content": sample.system}] if sample.system else []
        for number, turn in enumerate(sample.turns):
            media = sample.media if number == 0 else ()
            parts = [{"type": kinds[type(item)]} for item in media]
            messages.append(
                {"role": "user", "content": [*parts, {"type": "text", "text": turn.question}]}
            )
            messages.append({"role": "assistant", "content": turn.answer})
        ids = Prompt(tokenizer).of(sample, seen, text_first=False).ids
        once = [id for at, id in enumerate(ids) if at == 0 or id != ids[at - 1] or id < 2000]
        text = template.render(messages=messages, add_generation_prompt=False)
        assert once == tokenizer.encode(text).ids


@pytest.mark.parametrize("size", [(150, 210), (20, 30), (1000, 300), (168, 168), (97, 401)])
def test_pictures_get_the_server_s_size(size):
    least, most = (units * 28**2 for units in network.PICTURE_UNITS)
    assert fit(*size, network.PICTURE_UNITS) == images.fit_to_grid(*size, 28, least, most)
    assert resized(np.zeros((*size, 3), np.uint8), network.PICTURE_UNITS).shape[2] == 3


def test_a_full_batch_takes_no_more(tokenizer, samples):
    batch = Batch(Room(6, 1, 2, 2, 12, 200), ["any"])
    seen = [cut(media) for media in samples[1].media]
    assert not batch.add(samples[1], seen, Prompt(tokenizer).of(samples[1], seen, False))
    assert (batch.goes == 6 * batches.LENGTH).all()
    assert batches.sound_rows(16_000) == 25


def test_the_shipped_settings_are_those_of_the_network():
    """And none of them keeps vLLM from taking clips: it samples frames itself."""
    made = network.processors()
    for name, content in made.items():
        assert json.loads((network.FOLDER / name).read_text()) == content, name
    assert "do_sample_frames" not in made["video_preprocessor_config.json"]
