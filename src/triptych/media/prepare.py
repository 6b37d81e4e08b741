"""The bytes of a media file to what an encoder takes, as the model's recipe says.

Makes the media key, once, from what the encoder will see. Only decoding processes import this: it
imports the decoders. ``convert`` is the other module that such a process can be started with.
"""

from __future__ import annotations

import contextlib
import hashlib
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from triptych.config import Limits
from triptych.errors import MediaError, UnsupportedMediaType
from triptych.media.options import apply_options
from triptych.media.samples import sample_files
from triptych.messages import MediaForm, MediaKind, MediaMeta
from triptych.recipe import EmbedsFormat, GridVideo, MediaOptions, Recipes

if TYPE_CHECKING:
    from triptych.media.images import PreparedArrays

_WARM_UP_SIDE = 8  # pixels


def load_libraries(recipes: Recipes) -> None:
    """Import all that files of these recipes need. What embeddings need is imported with one."""
    if recipes.image is not None:
        import triptych.media.image_file
    if recipes.audio is not None:
        import triptych.media.audio
    if recipes.video is not None:
        import triptych.media.video  # noqa: F401
    if recipes.image is not None or recipes.video is not None:
        from triptych.media.images import resize

        # The first call of anything in torch takes far longer than the next.
        side = _WARM_UP_SIDE
        resize(np.zeros((side, side, 3), np.uint8), 2 * side, 2 * side, resample=3)


def prepare(
    kind: MediaKind,
    form: MediaForm,
    data: memoryview,
    recipes: Recipes,
    limits: Limits,
    allow_torch: bool,
    options: MediaOptions | None = None,
) -> tuple[MediaMeta, list[np.ndarray], int, bool]:
    """Meta with its media key, C-contiguous arrays, cost in the encoder, whether it is encoded.

    ``allow_torch``: ``data`` may be a torch file with an embedding. ``options``: what the request
    changes in the recipe. An array of uint16 holds bfloat16 (see ``dtype_name``).
    """
    if form == "embeds":
        meta, arrays, cost = _prepare_embeds(kind, data, recipes, limits, allow_torch)
    else:
        chosen = recipes if options is None else apply_options(recipes, kind, options)
        meta, arrays, cost = _prepare_file(kind, data, chosen, limits)
        if options is not None and options.fps and isinstance(chosen.video, GridVideo):
            meta = msgspec.structs.replace(meta, interval=chosen.video.frames.patch / options.fps)
    arrays = [np.ascontiguousarray(array) for array in arrays]
    return with_media_key(meta, arrays, recipes), arrays, cost, form == "embeds"


def self_test(kind: MediaKind, form: MediaForm, recipes: Recipes, limits: Limits) -> None:
    """Prepare good files of that kind. Passes on what the libraries raise, except refusals."""
    for sample in sample_files(kind, form):
        with contextlib.suppress(MediaError):  # too large for these limits, or not of this model
            prepare(kind, form, memoryview(sample), recipes, limits, False)


def dtype_name(array: np.ndarray) -> str:
    """As ``Array.dtype`` spells it. NumPy has no bfloat16, and nothing else here is uint16."""
    return "bfloat16" if array.dtype == np.uint16 else array.dtype.name


def with_media_key(meta: MediaMeta, arrays: list[np.ndarray], recipes: Recipes) -> MediaMeta:
    """The meta with its key: 256 bits of the recipes, the meta and what the encoder will see.

    ``recipes`` are the model's own. What options change shows in meta and arrays, so that a file
    that they do not change has the same key with and without them.
    """
    shapes = [(dtype_name(array), array.shape) for array in arrays]
    digest = hashlib.sha256(msgspec.msgpack.encode((recipes, meta, shapes)))
    for array in arrays:
        digest.update(array.data)
    return msgspec.structs.replace(meta, key=digest.digest())


def _prepare_file(
    kind: MediaKind, data: memoryview, recipes: Recipes, limits: Limits
) -> PreparedArrays:
    if kind == "image" and recipes.image is not None:
        from triptych.media.image_file import decode_image
        from triptych.media.images import prepare_image

        return prepare_image(decode_image(data, limits.image_pixels), recipes.image)
    if kind == "video" and recipes.video is not None:
        from triptych.media.video import prepare_video

        return prepare_video(data, recipes.video, recipes, limits)
    if kind == "audio" and recipes.audio is not None:
        from triptych.media.audio import prepare_audio

        return prepare_audio(data, recipes.audio, limits)
    raise _unsupported(kind)


def _prepare_embeds(
    kind: MediaKind, data: memoryview, recipes: Recipes, limits: Limits, allow_torch: bool
) -> PreparedArrays:
    from triptych.media.embeds import prepare_embeds

    recipe: EmbedsFormat | None = getattr(recipes, f"{kind}_embeds")
    if recipe is None:
        raise _unsupported(f"{kind} embeddings")
    return prepare_embeds(kind, data, recipe, limits, allow_torch)


def _unsupported(what: str) -> UnsupportedMediaType:
    return UnsupportedMediaType(f"This model takes no {what}.")
