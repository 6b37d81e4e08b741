"""A file's bytes to what an encoder takes, as the model's recipe says: the work of a sandbox.

The media key is made here, once, of what the encoder will see. Runs in the decode pool's processes
and nowhere else: it imports what decodes.
"""

from __future__ import annotations

import contextlib
import hashlib

import msgspec
import numpy as np

from triptych.config import Limits
from triptych.errors import MediaError, UnsupportedMediaType
from triptych.media.samples import sample_files
from triptych.messages import MediaForm, MediaKind, MediaMeta
from triptych.recipe import (
    AnyresImage,
    EmbedsFormat,
    GridImage,
    ImageRecipe,
    Recipes,
    SquareImage,
    TiledImage,
)

_WARM = 8  # pixels on a side

_Prepared = tuple[MediaMeta, list[np.ndarray], int]  # meta without its key, arrays, cost


def load_libraries(recipes: Recipes) -> None:
    """Import all that files of these recipes need; what embeddings need comes when one comes."""
    if recipes.image is not None:
        import triptych.media.image_file
    if recipes.audio is not None:
        import triptych.media.audio
    if recipes.video is not None:
        import triptych.media.video  # noqa: F401
    if recipes.image is not None or recipes.video is not None:
        from triptych.media.resize import resize

        # Torch's first call of anything takes longer than all others.
        resize(np.zeros((_WARM, _WARM, 3), np.uint8), 2 * _WARM, 2 * _WARM, resample=3)


def prepare(
    kind: MediaKind,
    form: MediaForm,
    data: memoryview,
    recipes: Recipes,
    limits: Limits,
    allow_torch: bool,
) -> tuple[MediaMeta, list[np.ndarray], int, bool]:
    """Meta with its media key, C-contiguous arrays, cost in the encoder, whether it is encoded.

    ``allow_torch``: ``data`` may be a torch file with an embedding. An array of uint16 holds
    bfloat16 (see ``dtype_name``).
    """
    if form == "embeds":
        meta, arrays, cost = _embeds(kind, data, recipes, limits, allow_torch)
    else:
        meta, arrays, cost = _file(kind, data, recipes, limits)
    arrays = [np.ascontiguousarray(array) for array in arrays]
    return with_media_key(meta, arrays, recipes), arrays, cost, form == "embeds"


def self_test(kind: MediaKind, form: MediaForm, recipes: Recipes, limits: Limits) -> None:
    """Prepare good files of that kind. Raises what the libraries raise, unless they refuse it."""
    for sample in sample_files(kind, form):
        with contextlib.suppress(MediaError):  # too large for these limits, or not of this model
            prepare(kind, form, memoryview(sample), recipes, limits, False)


def dtype_name(array: np.ndarray) -> str:
    """As ``Array.dtype`` spells it. NumPy has no bfloat16, and nothing else here is uint16."""
    return "bfloat16" if array.dtype == np.uint16 else array.dtype.name


def with_media_key(meta: MediaMeta, arrays: list[np.ndarray], recipes: Recipes) -> MediaMeta:
    """The meta with the 256-bit identity of what the encoder gets, from whom and for whom."""
    shapes = [(dtype_name(array), array.shape) for array in arrays]
    digest = hashlib.sha256(msgspec.msgpack.encode((recipes, meta, shapes)))
    for array in arrays:
        digest.update(array.data)
    return msgspec.structs.replace(meta, key=digest.digest())


def _file(kind: MediaKind, data: memoryview, recipes: Recipes, limits: Limits) -> _Prepared:
    if kind == "image" and recipes.image is not None:
        return _image(data, recipes.image, limits)
    if kind == "video" and recipes.video is not None:
        from triptych.media import video

        return video.prepare_video(data, recipes.video, recipes, limits)
    if kind == "audio" and recipes.audio is not None:
        from triptych.media import audio

        return audio.prepare_audio(data, recipes.audio, limits)
    raise _not_taken(kind, "")


def _image(data: memoryview, recipe: ImageRecipe, limits: Limits) -> _Prepared:
    from triptych.media import image_file

    image = image_file.decode_image(data, limits.image_pixels)
    match recipe:
        case GridImage():
            from triptych.media import grid

            return grid.prepare_grid_image(image, recipe)
        case SquareImage():
            from triptych.media import square

            return square.prepare_square_image(image, recipe)
        case AnyresImage():
            from triptych.media import anyres

            return anyres.prepare_anyres_image(image, recipe)
        case TiledImage():
            from triptych.media import tiles

            return tiles.prepare_tiled_image(image, recipe)


def _embeds(
    kind: MediaKind, data: memoryview, recipes: Recipes, limits: Limits, allow_torch: bool
) -> _Prepared:
    from triptych.media import embeds

    recipe: EmbedsFormat | None = getattr(recipes, f"{kind}_embeds")
    if recipe is None:
        raise _not_taken(kind, " embeddings")
    return embeds.prepare_embeds(kind, data, recipe, limits, allow_torch)


def _not_taken(kind: str, what: str) -> UnsupportedMediaType:
    return UnsupportedMediaType(f"This model takes no {kind}{what}.")
