"""Media options of a request, applied to the recipes of a model: pure data, no decoder.

An option that a recipe cannot follow is refused by its name. Pixels, and frames of models that
bound them, have the limits of the model's own recipe; the limits on decoding and the context bound
the rest.
"""

from __future__ import annotations

from msgspec.structs import replace

from triptych.errors import InvalidValue, UnsupportedParameter
from triptych.messages import PLURALS, MediaKind
from triptych.recipe import (
    FrameSampling,
    GridImage,
    GridVideo,
    ImageRecipe,
    MediaOptions,
    Recipes,
    TiledImage,
    VideoRecipe,
)


def apply_options(recipes: Recipes, kind: MediaKind, options: MediaOptions) -> Recipes:
    """The recipes for one item of a request. Raises UnsupportedParameter or InvalidValue."""
    if kind == "image" and recipes.image is not None:
        return replace(recipes, image=_image(recipes.image, options))
    if kind == "video" and recipes.video is not None:
        return replace(recipes, video=_video(recipes.video, options))
    return recipes


def _image(recipe: ImageRecipe, options: MediaOptions) -> ImageRecipe:
    if isinstance(recipe, GridImage):
        least, most = _pixels(recipe, options)
        if options.pixel_cap:
            most = min(most, max(options.pixel_cap, least))
        return replace(recipe, min_pixels=least, max_pixels=most)
    _refuse_pixels(options, "image")
    if options.pixel_cap and isinstance(recipe, TiledImage):
        return replace(
            recipe, max_tiles=min(recipe.max_tiles, max(1, options.pixel_cap // recipe.side**2))
        )
    return recipe  # the cap is a hint: squares have one size


def _video(recipe: VideoRecipe, options: MediaOptions) -> VideoRecipe:
    frames = _frames(recipe.frames, options)
    if not isinstance(recipe, GridVideo):
        _refuse_pixels(options, "video")
        _refuse_audio(options)
        return replace(recipe, frames=frames)
    least, most = _pixels(recipe, options)
    if not recipe.with_audio:
        _refuse_audio(options)
    with_audio = recipe.with_audio and options.use_audio_in_video is not False
    return replace(recipe, frames=frames, min_pixels=least, max_pixels=most, with_audio=with_audio)


def _frames(frames: FrameSampling, options: MediaOptions) -> FrameSampling:
    count, fps = options.num_frames, options.fps
    if frames.rule == "even":
        if fps:
            return replace(frames, rule="rate", fps=fps, count=count)
        return replace(frames, count=count or frames.count)
    if count > frames.most:
        raise InvalidValue(
            f"num_frames is {count}; this model takes at most {frames.most} frames of a video.",
            param="num_frames",
        )
    if count and fps:  # the fewer of both
        least, most = min(frames.least, count), min(frames.most, count)
        return replace(frames, fps=fps, least=least, most=most)
    return replace(frames, count=count, fps=fps or frames.fps)


def _pixels(recipe: GridImage | GridVideo, options: MediaOptions) -> tuple[int, int]:
    """Fewest and most pixels: at most the model's own."""
    most = options.max_pixels or recipe.max_pixels
    least = options.min_pixels or min(recipe.min_pixels, most)
    for name, value in (("max_pixels", most), ("min_pixels", least)):
        if value > recipe.max_pixels:
            raise InvalidValue(
                f"{name} is {value}; this model takes at most {recipe.max_pixels}.", param=name
            )
    if least > most:
        raise InvalidValue(
            f"min_pixels is {least}, more than the {most} of max_pixels.", param="min_pixels"
        )
    return least, most


def _refuse_pixels(options: MediaOptions, kind: MediaKind) -> None:
    for name in ("min_pixels", "max_pixels"):
        if getattr(options, name):
            raise _unsupported(name, f"its {PLURALS[kind]} have one size")


def _refuse_audio(options: MediaOptions) -> None:
    if options.use_audio_in_video:
        raise _unsupported("use_audio_in_video", "it does not hear the sound of videos")


def _unsupported(name: str, why: str) -> UnsupportedParameter:
    return UnsupportedParameter(
        f"This model cannot follow '{name}': {why}. Leave it out.", param=name
    )
