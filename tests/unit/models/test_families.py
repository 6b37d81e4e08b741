from __future__ import annotations

import random

import numpy as np
import pytest
import torch

import reference
from support.pictures import draw
from support.torch_engine import prepared
from triptych import models
from triptych.checkpoint import Model, open_model
from triptych.engines.torch import weights
from triptych.errors import UnsupportedModel
from triptych.messages import MediaMeta
from triptych.models.layouts import EmbeddingSpan


def test_an_unknown_family_is_refused_with_those_there_are(tmp_path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "gpt9", "vocab_size": 9}')
    with pytest.raises(UnsupportedModel, match=r"'gpt9'.*llava.*qwen2_5_vl"):
        models.find_family(open_model(tmp_path))


def test_a_tower_unlike_its_processor_is_refused(tmp_path, model: Model) -> None:
    (tmp_path / "config.json").write_bytes((model.folder / "config.json").read_bytes())
    (tmp_path / "preprocessor_config.json").write_text(
        '{"patch_size": 15, "size": {"shortest_edge": 224}, "crop_size": 224}'
    )
    with pytest.raises(UnsupportedModel, match="image processor"):
        models.find_family(open_model(tmp_path))


def test_encoding_equals_stock_bit_for_bit(model: Model) -> None:
    pictures = [draw(i) for i in range(5)]
    family = models.find_family(model)
    module = weights.load_part(family, model, "encoder", "cpu", torch.float32)
    items = [prepared(family.recipes.image, picture) for picture in pictures]
    with torch.inference_mode():
        ours = family.encode(module, items)
    stock = reference.image_features(model.folder, pictures)
    assert [len(rows) for rows in ours] == [item.meta.tokens for item in items]
    assert all(rows.shape[1] == family.width for rows in ours)
    for mine, theirs in zip(ours, stock, strict=True):
        assert torch.equal(mine, theirs)


def test_a_batch_equals_one_by_one(model: Model) -> None:
    family = models.find_family(model)
    module = weights.load_part(family, model, "encoder", "cpu", torch.float32)
    items = [prepared(family.recipes.image, draw(i)) for i in range(6)]
    with torch.inference_mode():
        together = family.encode(module, items)
        alone = [family.encode(module, [item])[0] for item in items]
    for mine, theirs in zip(together, alone, strict=True):
        torch.testing.assert_close(mine, theirs, atol=2e-5, rtol=1e-5)


def test_language_equals_stock(model: Model) -> None:
    family = models.find_family(model)
    language = family.language(weights.load_part(family, model, "language", "cpu", torch.float32))
    ids = list(range(3, 60))
    positions = torch.from_numpy(family.layout(ids, (), ()).positions)
    with torch.inference_mode():
        hidden = language.model(
            inputs_embeds=language.embed(torch.tensor([ids])),
            position_ids=positions[:, None] if len(positions) > 1 else positions,
            use_cache=False,
        ).last_hidden_state
        ours = language.head(hidden)
        stock = reference.stock_model(model.folder)(input_ids=torch.tensor([ids])).logits
    torch.testing.assert_close(ours, stock, atol=1e-5, rtol=1e-5)
    assert (language.layers, language.kv_heads, language.head_dim, language.hidden) == (
        3,
        2,
        32,
        128,
    )


def media(model: Model, *pictures: int) -> list[MediaMeta]:
    recipe = models.find_family(model).recipes.image
    return [prepared(recipe, draw(index)).meta for index in pictures]


@pytest.mark.parametrize("seed", range(8))
def test_three_axis_positions_equal_stock(checkpoints, seed: int) -> None:
    model = open_model(checkpoints["qwen2_5_vl"])
    rng = random.Random(seed)
    metas = media(model, *range(seed, seed + 1 + seed % 4))
    prompt: list[int] = [5] * rng.randrange(0, 4)
    at = []
    for _ in metas:
        at.append(len(prompt))
        prompt += [
            model.media_ids["image"],
            *[7] * rng.randrange(1, 9),
        ]  # stock needs a token in between
    if seed == 7:
        del prompt[at[-1] + 1 :]  # a picture at the very end
    layout = models.find_family(model).layout(prompt, at, metas)
    ids = torch.tensor([layout.ids])
    stock, delta = reference.stock_model(model.folder).model.get_rope_index(
        ids,
        mm_token_type_ids=(ids == model.media_ids["image"]).int(),
        image_grid_thw=torch.tensor([meta.grid for meta in metas]),
    )
    assert layout.positions.dtype == np.int64
    assert np.array_equal(layout.positions, stock[:, 0])
    assert layout.next_position == len(layout.ids) + delta.item()


def test_pictures_side_by_side_keep_their_own_positions(checkpoints) -> None:
    model = open_model(checkpoints["qwen2_5_vl"])
    metas = media(model, 0, 1)
    layout = models.find_family(model).layout([model.media_ids["image"]] * 2, [0, 1], metas)
    second = layout.positions[:, metas[0].tokens :]
    assert second.min() == max(metas[0].grid[1:]) // 2
    assert len(np.unique(second[0])) == 1


def test_layout_expands_placeholders(model: Model) -> None:
    image = model.media_ids["image"]
    metas = media(model, 0, 1)
    first, second = (meta.tokens for meta in metas)
    layout = models.find_family(model).layout([1, image, 2, 3, image, 4], [1, 4], metas)
    assert layout.ids == (1, *[image] * first, 2, 3, *[image] * second, 4)
    assert layout.spans == (EmbeddingSpan(1, first, 0), EmbeddingSpan(3 + first, second, 1))
    assert layout.positions.shape[1] == len(layout.ids)


def test_a_placeholder_id_in_plain_text_stays_one_token(model: Model) -> None:
    image = model.media_ids["image"]
    layout = models.find_family(model).layout([image, 1, image], [2], media(model, 0))
    assert layout.ids[:2] == (image, 1)
    assert layout.spans[0].offset == 2


def test_text_positions_count_up(model: Model) -> None:
    layout = models.find_family(model).layout([1, 2, 3], [], [])
    assert all(axis.tolist() == [0, 1, 2] for axis in layout.positions)
    assert len(layout.positions) == (1 if model.family == "llava" else 3)
    assert layout.next_position == 3


def test_llava_positions_count_through_pictures(checkpoints) -> None:
    model = open_model(checkpoints["llava"])
    layout = models.find_family(model).layout(
        [1, model.media_ids["image"], 2], [1], media(model, 3)
    )
    assert layout.positions.tolist() == [list(range(len(layout.ids)))]
    assert layout.next_position == len(layout.ids)
