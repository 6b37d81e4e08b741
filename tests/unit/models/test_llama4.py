"""Llama 4 beside stock transformers: rows, expansion, tokens, and the one chunk of attention."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save
from tokenizers import Tokenizer
from transformers import Llama4Processor

import reference
from support.goldens import load
from support.mixed import Mixed, ready
from support.pictures import draw
from support.stock_contract import check_prefill_and_decode_apart, check_tokens_and_logprobs
from support.torch_engine import frozen, whole
from triptych import models
from triptych.checkpoint import open_model
from triptych.commands import launch
from triptych.config import Config, Limits
from triptych.engines.base import Media
from triptych.engines.torch.encoder import with_embeds_recipes
from triptych.engines.torch.weights import EmptyWeights
from triptych.errors import ContextLengthExceeded, UnsupportedModel
from triptych.media import embeds, images
from triptych.media.base import PreparedMedia
from triptych.models.llama4 import bfloat16_table
from triptych.recipe import TiledImage

# one tile, a line of them, a column, a square, many
SHAPES = ((40, 56), (150, 50), (50, 180), (100, 112), (400, 300), (60, 30))
CHUNK = 2048


@pytest.fixture(scope="module")
def bench(benches) -> Mixed:
    return benches("llama4")


def shown(bench: Mixed, number: int) -> PreparedMedia:
    recipe = bench.family.recipes.image
    assert isinstance(recipe, TiledImage)
    meta, [pixels], cost = images.prepare_tiled_image(
        draw(number, *SHAPES[number % len(SHAPES)]), recipe
    )
    return ready(meta, pixels, cost)


def stock_inputs(items: Sequence[PreparedMedia]) -> dict[str, torch.Tensor]:
    """The stock processor needs torchvision; from 8 bits on its arithmetic is this."""
    if not items:
        return {}
    pixels = np.concatenate(
        [
            np.frombuffer(item.arrays[0].buffer, np.uint8).reshape(item.arrays[0].shape)
            for item in items
        ]
    )
    values = torch.from_numpy(pixels).permute(0, 3, 1, 2).to(torch.bfloat16) * (1 / 255)
    half = torch.tensor(0.5, dtype=torch.bfloat16)
    return {"pixel_values": values.sub(half).div(half).float()}


def test_pictures_of_all_shapes_in_one_batch_are_encoded_as_stock_does(bench: Mixed) -> None:
    items = [shown(bench, number) for number in range(len(SHAPES))]
    stock = reference.stock_model(bench.folder)
    with torch.inference_mode():
        seen = stock.get_image_features(**stock_inputs(items)).last_hidden_state
        theirs = stock.multi_modal_projector(seen).flatten(0, 1)
    rows = bench.encode(items)
    assert [len(each) for each in rows] == [item.meta.tokens for item in items]
    assert {item.meta.grid for item in items} >= {(1, 1), (1, 3), (4, 1), (2, 2)}
    assert torch.equal(torch.cat(rows), theirs)


def test_the_tone_is_that_of_the_stock_processor(bench: Mixed) -> None:
    """Which rounds to bfloat16 at every step; recorded where it ran."""
    table = bfloat16_table(bench.family.recipes.image.tone, torch.device("cpu"), torch.float32)
    goldens = load("llama4.npz")
    assert goldens
    for golden in goldens:
        raw, toned = torch.from_numpy(golden.rows)
        assert torch.equal(table[raw.long()], toned)  # the same for every channel


def test_placeholders_expand_as_stock_does(bench: Mixed) -> None:
    tokenizer = Tokenizer.from_file(str(bench.folder / "tokenizer.json"))
    stock = object.__new__(Llama4Processor)  # building one needs torchvision
    items = [shown(bench, number) for number in range(len(SHAPES))]
    patterns = [stock._prompt_split_image(item.meta.grid, 4) for item in items]
    expected = tokenizer.encode("a ".join(["", *patterns, "b"]), add_special_tokens=False).ids
    prompt = tokenizer.encode("a ".join(["", *["<|patch|>"] * len(items), "b"])).ids[1:]
    layout = bench.family.layout(prompt, bench.places(prompt), [item.meta for item in items])
    assert list(layout.ids) == expected
    patch = tokenizer.token_to_id("<|patch|>")
    covered = {at for span in layout.spans for at in range(span.offset, span.offset + span.length)}
    assert covered == {at for at, id in enumerate(expected) if id == patch}
    for number, item in enumerate(items):  # every row once, in order
        rows = [(span.row, span.length) for span in layout.spans if span.item == number]
        assert rows == [(row, 4) for row in range(0, item.meta.tokens, 4)]
    assert layout.positions.tolist() == [list(range(len(expected)))]
    assert layout.next_position == len(expected)


# Words, and pictures by number where they stand.
PROMPTS: tuple[tuple[str | int, ...], ...] = (
    ("aaa",),
    ("a" * 90,),
    ("aa", 0, "a"),
    ("a", 1, "aaaa", 2, "a"),
    (3, 4, "aaa"),
    ("aaaaaaa", 5, "a", 5, "aa"),
)


def asked(bench: Mixed, parts: Sequence[str | int]) -> tuple[list[int], list[PreparedMedia]]:
    prompt, items = [2000], []
    for part in parts:
        if isinstance(part, int):
            prompt.append(bench.model.media_ids["image"])
            items.append(shown(bench, part))
        else:
            prompt += [100 + 7 * len(prompt) % 900 + at for at in range(len(part))]
    return prompt, items


@pytest.fixture(scope="module")
def answered(bench: Mixed) -> list[tuple[list[int], list[PreparedMedia], reference.Reference]]:
    made = [asked(bench, parts) for parts in PROMPTS]
    return [(*each, bench.expect(*each, stock_inputs(each[1]))) for each in made]


async def test_embeddings_that_a_client_brings_give_the_same(bench, answered) -> None:
    prompt, items, expected = answered[3]
    recipe = with_embeds_recipes(bench.family.recipes, bench.family.width, "float32").image_embeds
    assert recipe is not None
    work, media = bench.ask(prompt, items)
    brought = []
    for item, rows in zip(items, bench.encode(items), strict=True):
        file = save({"image_embeds": rows, "aspect_ratios": torch.tensor(item.meta.grid)})
        meta, [array], _ = embeds.prepare_embeds("image", memoryview(file), recipe, Limits(), False)
        brought.append(Media(meta, (frozen(torch.from_numpy(array.copy())),)))
    with bench.engine() as engine:
        assert (await whole(engine, work, tuple(brought))).ids == expected.ids
    assert [each.meta.grid for each in brought] == [each.meta.grid for each in media]


@pytest.mark.parametrize("settings", [{}, {"step_tokens": 24, "block_size": 4}], ids=str)
async def test_tokens_and_logprobs_are_those_of_stock(bench, answered, settings) -> None:
    """Tokens of many sequences in one row, each with the temperature of its own place."""
    await check_tokens_and_logprobs(bench, answered, 1e-4, **settings)


async def test_prefill_and_decode_apart_give_the_same(bench, answered) -> None:
    await check_prefill_and_decode_apart(bench, answered)


async def test_the_next_turn_finds_what_went_before(bench) -> None:
    prompt, items = asked(bench, ("a", 4, "aaa"))
    with bench.engine(block_size=4) as engine:
        answer = await whole(engine, *bench.ask(prompt, items))
        known = answer.deltas[0].prompt.tokens + len(answer.ids) - 1
        grown = [*prompt, *answer.ids, 50, bench.model.media_ids["image"], 51]
        items = [*items, shown(bench, 2)]
        follow = await whole(engine, *bench.ask(grown, items))
    assert follow.deltas[0].prompt.cached == known // 4 * 4
    assert follow.ids == bench.expect(grown, items, stock_inputs(items)).ids


def test_answers_depend_on_pictures_their_order_and_words(bench) -> None:
    def answer(*parts: str | int) -> list[int]:
        prompt, items = asked(bench, parts)
        return bench.expect(prompt, items, stock_inputs(items)).ids[:8]

    cold = answer("aa", 1, "aaa", 3, "a")
    for other in (
        ("aa", 7, "aaa", 3, "a"),
        ("aa", 1, "aaa", 9, "a"),
        ("aa", 3, "aaa", 1, "a"),
        ("aa", 1, "aaaa", 3, "a"),
    ):
        assert answer(*other) != cold


def test_the_temperature_follows_the_place(bench) -> None:
    """What the tiny checkpoint is sensitive to: else the equality above would say nothing."""
    ids = torch.tensor([range(300, 420)])
    model, embeds = bench.language.model, bench.language.embed(ids)
    where = torch.arange(ids.shape[1])[None]
    model.config._attn_implementation = "sdpa"
    with torch.inference_mode():
        right = model(inputs_embeds=embeds, position_ids=where).last_hidden_state
        stock = reference.stock_model(bench.folder).language_model.model(input_ids=ids)
        for layer in model.layers:
            layer.self_attn.attn_temperature_tuning = False
        flat = model(inputs_embeds=embeds, position_ids=where).last_hidden_state
        for layer in model.layers:
            layer.self_attn.attn_temperature_tuning = True
    assert torch.equal(right, stock.last_hidden_state)
    assert (right - flat).abs().max() > 0.1


def test_no_weight_takes_memory_before_it_is_read(bench) -> None:
    with EmptyWeights():
        module = bench.family.build_language()
    assert all(parameter.is_meta for parameter in module.parameters())
    assert not any(buffer.is_meta for buffer in module.buffers())


def test_one_chunk_is_served_and_more_is_refused(bench, tmp_path: Path) -> None:
    model = open_model(bench.folder)
    assert model.context == 2 * CHUNK
    assert models.limit_context(model).context == CHUNK
    assert models.limit_context(open_model(bench.folder, CHUNK), CHUNK).context == CHUNK
    assert models.limit_context(open_model(bench.folder, 100), 100).context == 100
    asked = open_model(bench.folder, CHUNK + 1)
    with pytest.raises(UnsupportedModel, match=r"max_model_len is 2049.*chunks of 2048.*vllm"):
        models.limit_context(asked, CHUNK + 1)
    with pytest.raises(UnsupportedModel, match="max_model_len is 2049"):
        launch.resolve(Config(model=str(bench.folder), max_model_len=CHUNK + 1))
    config = json.loads((bench.folder / "config.json").read_text())
    del config["text_config"]["attention_chunk_size"]
    config["text_config"]["max_position_embeddings"] = 1 << 20
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert models.limit_context(open_model(tmp_path)).context == 8192


def test_frontend_and_workers_get_the_chunk_as_their_context(bench, capsys) -> None:
    config = launch.resolve(Config(model=str(bench.folder)))
    assert config.max_model_len == CHUNK
    assert "2048 tokens" in capsys.readouterr().err
    assert launch.resolve(config) == config


async def test_up_to_the_end_of_the_chunk_tokens_are_those_of_stock(bench, monkeypatch) -> None:
    """The last token of a chunk is where the temperature of the large models changes first."""
    monkeypatch.setattr(bench, "model", models.limit_context(bench.model))
    prompt = [100 + at * 37 % 1500 for at in range(CHUNK - 6)]
    with bench.engine(step_tokens=300) as engine:
        answer = await whole(engine, *bench.ask(prompt, [], max_tokens=6, ignore_eos=True))
        with pytest.raises(ContextLengthExceeded):
            await whole(engine, *bench.ask(prompt, [], max_tokens=7))
    expected = reference.generate(bench.folder, prompt, max_tokens=6, ignore_eos=True)
    assert answer.ids == expected.ids


@pytest.mark.parametrize(
    ("file", "change", "reason"),
    [
        ("preprocessor_config.json", {"size": {"height": 28, "width": 28}}, "tiles of 28"),
        ("preprocessor_config.json", {"size": {"height": 56, "width": 28}}, "not square"),
        ("preprocessor_config.json", {"do_normalize": False}, "do_normalize"),
        ("tokenizer.json", {"added_tokens": []}, r"lacks .*tile_x_separator"),
    ],
)
def test_settings_that_would_silently_differ_are_refused(
    bench: Mixed, tmp_path: Path, file: str, change: dict[str, Any], reason: str
) -> None:
    shutil.copytree(bench.folder, tmp_path / "other")
    path = tmp_path / "other" / file
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(UnsupportedModel, match=reason):
        models.find_family(open_model(tmp_path / "other"))
