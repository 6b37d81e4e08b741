from __future__ import annotations

import importlib
import subprocess
import sys

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from safetensors.torch import save

from support.pictures import draw, encoded
from triptych.commands.doctor import RECIPES as MACHINE
from triptych.config import Limits
from triptych.errors import (
    ImageTooLarge,
    ImageTooSmall,
    InvalidMedia,
    MediaError,
    UnsupportedMediaType,
)
from triptych.media.prepare import dtype_name, prepare, self_test, with_media_key
from triptych.messages import MediaForm, MediaKind, MediaMeta
from triptych.recipe import (
    AnyresImage,
    EmbedsFormat,
    GridImage,
    ImageRecipe,
    Normalization,
    Recipes,
    SquareImage,
    TiledImage,
)

TONE = Normalization(1 / 255, (0.5, 0.5, 0.5), (0.5, 0.5, 0.5))
GRID = GridImage(14, 2, 28 * 28, 28 * 28 * 64, 3, TONE)
SQUARE = SquareImage(28, 28, 14, 0, 3, TONE)
ANYRES = AnyresImage(((28, 56), (56, 28)), SQUARE)
TILED = TiledImage(28, 4, False, 1, 2, TONE)
EVERY = [GRID, SQUARE, ANYRES, TILED]
LIMITS = Limits(image_pixels=1_000_000)


def made(
    data: bytes,
    image: ImageRecipe | None = GRID,
    kind: MediaKind = "image",
    form: MediaForm = "file",
    revision: str = "1",
) -> tuple[MediaMeta, list[np.ndarray], int, bool]:
    recipes = Recipes(revision, image=image, image_embeds=EmbedsFormat(8, "bfloat16"))
    return prepare(kind, form, memoryview(data), recipes, LIMITS, False)


@pytest.mark.parametrize("recipe", EVERY, ids=lambda recipe: type(recipe).__name__)
def test_a_picture_by_every_recipe(recipe: ImageRecipe) -> None:
    meta, (pixels,), cost, is_encoded = made(encoded(draw(1, 60, 40)), recipe)
    assert len(meta.key) == 32
    assert meta.tokens > 0
    assert cost > 0
    assert not is_encoded
    assert pixels.dtype == np.uint8
    assert pixels.flags.c_contiguous
    again, (same,), _, _ = made(encoded(draw(1, 60, 40), "WEBP", lossless=True), recipe)
    assert again == meta
    assert np.array_equal(same, pixels)


def test_an_embedding() -> None:
    rows = torch.randn(3, 8)
    meta, (got,), cost, is_encoded = made(save({"a": rows}), form="embeds")
    assert is_encoded
    assert (meta.tokens, cost, dtype_name(got)) == (3, 0, "bfloat16")
    assert torch.equal(torch.from_numpy(got.copy()).view(torch.bfloat16), rows.bfloat16())


@pytest.mark.parametrize("kind", ["image", "video", "audio"])
@pytest.mark.parametrize(("form", "words"), [("file", "{}"), ("embeds", "{} embeddings")])
def test_a_kind_without_a_recipe_is_named(kind: MediaKind, form: MediaForm, words: str) -> None:
    with pytest.raises(UnsupportedMediaType, match=f"no {words.format(kind)}\\."):
        prepare(kind, form, memoryview(b"any"), Recipes("1"), LIMITS, False)


def test_b40_keys_distinguish_everything() -> None:
    tall, wide = draw(1, 28, 56), draw(1, 56, 28)
    wide.frombytes(tall.tobytes())
    other = tall.copy()
    other.putpixel((0, 0), (1, 2, 3))
    variants = [
        made(encoded(tall)),
        made(encoded(wide)),
        made(encoded(other)),
        made(encoded(tall), revision="2"),
        made(
            encoded(tall),
            msgspec.structs.replace(GRID, tone=Normalization(1.0, TONE.mean, TONE.std)),
        ),
        made(encoded(tall), SQUARE),
    ]
    keys = [meta.key for meta, *_ in variants]
    assert len(set(keys)) == len(keys)
    assert made(encoded(tall))[0].key == keys[0]


def test_b40_same_pixels_with_another_palette() -> None:
    indices = Image.fromarray(np.arange(28 * 28, dtype=np.uint16).reshape(28, 28).astype(np.uint8))
    red, blue = indices.convert("P"), indices.convert("P")
    red.putpalette([value for i in range(256) for value in (i, 0, 0)])
    blue.putpalette([value for i in range(256) for value in (0, 0, i)])
    assert made(encoded(red))[0].key != made(encoded(blue))[0].key


def test_b40_what_the_meta_says_is_part_of_the_key() -> None:
    array, recipes = np.zeros((4, 6), np.uint8), Recipes("1")
    metas = [
        MediaMeta(b"", 4),
        MediaMeta(b"", 5),
        MediaMeta(b"", 4, (1, 2, 2)),
        MediaMeta(b"", 4, kind="video"),
        MediaMeta(b"", 4, times=(1.0,)),
        MediaMeta(b"", 4, audio_tokens=1),
    ]
    keys = {with_media_key(meta, [array], recipes).key for meta in metas}
    keys |= {with_media_key(metas[0], [array.reshape(6, 4)], recipes).key}
    keys |= {with_media_key(metas[0], [array.view(np.int8)], recipes).key}
    keys |= {with_media_key(metas[0], [array[:2], array[2:]], recipes).key}
    assert len(keys) == len(metas) + 3


BROKEN = {
    "b26 empty": (b"", InvalidMedia),
    "b26 html": (b"<html></html>", InvalidMedia),
    "b26 cut": (encoded(draw(1, 64, 64), "JPEG")[:900], InvalidMedia),
    "b27": (encoded(draw(0, 1001, 1000)), ImageTooLarge),
    "b28": (encoded(draw(0, 1, 4096)), ImageTooSmall),
    "b29": (encoded(draw(0, 8, 8), "GIF"), UnsupportedMediaType),
}


@pytest.mark.parametrize("name", BROKEN)
def test_bad_pictures(name: str) -> None:
    data, error = BROKEN[name]
    with pytest.raises(error):
        made(data)


@pytest.mark.parametrize("size", [(1, 1), (1, 4096), (4096, 1)])
@pytest.mark.parametrize("recipe", [SQUARE, ANYRES, TILED], ids=lambda each: type(each).__name__)
def test_b28_other_models_take_needles(size: tuple[int, int], recipe: ImageRecipe) -> None:
    assert made(encoded(draw(0, *size)), recipe)[0].tokens > 0


def _exif() -> Image.Exif:
    exif = Image.Exif()
    exif[0x0112] = 6
    return exif


FILES = [
    encoded(draw(1, 16, 16), "JPEG", exif=_exif()),
    encoded(draw(2, 16, 16), "PNG", exif=_exif()),
    encoded(draw(1, 16, 16), "JPEG"),
    encoded(draw(2, 16, 16), "PNG"),
    encoded(draw(3, 16, 16).convert("P"), "PNG", transparency=1),
    encoded(draw(2, 16, 16), "WEBP"),
    encoded(draw(2, 16, 16), "WEBP", lossless=True),
]
CHANGES = st.lists(st.tuples(st.floats(0, 1, exclude_max=True), st.integers(0, 255)), max_size=6)


@settings(max_examples=250, deadline=None)
@given(st.sampled_from(FILES), CHANGES, st.floats(0, 1))
def test_a_changed_file_is_refused_or_a_picture(
    file: bytes, changes: list[tuple[float, int]], end: float
) -> None:
    data = bytearray(file)
    for place, value in changes:
        data[int(place * len(data))] = value
    for raw in (data, data[: int(end * len(data))]):
        try:
            meta, (pixels,), *_ = made(bytes(raw))
        except MediaError:
            continue
        assert pixels.shape == (meta.grid[1] * 14, meta.grid[2] * 14, 3)


def test_libraries_are_loaded_before_the_first_file() -> None:
    file = encoded(draw(1, 60, 40)).hex()
    code = f"""
import sys
from triptych.config import Limits
from triptych.media.prepare import load_libraries, prepare
from triptych.recipe import *
tone = Normalization(1 / 255, (0.5, 0.5, 0.5), (0.5, 0.5, 0.5))
square = SquareImage(28, 28, 14, 0, 3, tone)
load_libraries(Recipes("1", audio=MelAudio(16000, 400, 160, 128, 3000)))
print("torch" in sys.modules)
for image in (GridImage(14, 2, 784, 50176, 3, tone), square, AnyresImage(((28, 56),), square)):
    recipes = Recipes("1", image=image)
    load_libraries(recipes)
    before = set(sys.modules)
    prepare("image", "file", memoryview(bytes.fromhex("{file}")), recipes, Limits(), False)
    new = set(sys.modules) - before
    print(*[name for name in new if name.split(".")[0] not in ("triptych", "PIL")])
print([name for name in ("torch", "transformers") if name in sys.modules])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split("\n") == ["False", "", "", "", "['torch']", ""]


@pytest.mark.parametrize("form", ["file", "embeds"])
@pytest.mark.parametrize("kind", ["image", "video", "audio"])
def test_the_self_test_passes_here(kind: MediaKind, form: MediaForm) -> None:
    self_test(kind, form, MACHINE, Limits())


@pytest.mark.parametrize("module", ["Png", "Jpeg", "WebP"])
def test_the_self_test_finds_a_format_that_does_not_fit(
    monkeypatch: pytest.MonkeyPatch, module: str
) -> None:
    plugin = importlib.import_module(f"PIL.{module}ImagePlugin")
    monkeypatch.setattr(getattr(plugin, f"{module}ImageFile"), "load", None)
    with pytest.raises(TypeError):
        self_test("image", "file", MACHINE, Limits())
