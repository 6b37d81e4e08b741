"""Recipes: how the media of a model are prepared, as data.

A recipe says what happens to a decoded file before the encoder gets it: which frames, which size,
how many rows its embedding has. The engine that loads the model creates it, and the decoder
processes follow it, in workers or in the frontend. No code here, no library.
"""

from __future__ import annotations

from msgspec import Struct


class Normalization(Struct, frozen=True, array_like=True):
    """An 8-bit value times ``rescale``, minus ``mean``, divided by ``std``.

    The encoder applies it: pixels are sent as 8 bit.
    """

    rescale: float
    mean: tuple[float, float, float]
    std: tuple[float, float, float]


class GridImage(Struct, frozen=True, array_like=True, tag="grid_image"):
    """Qwen-VL: a picture keeps its shape, rounded to whole merged patches.

    Gives uint8 [height, width, 3]; grid (1, rows, columns) in patches.
    """

    patch: int
    merge: int
    min_pixels: int
    max_pixels: int
    resample: int  # as Pillow numbers them
    tone: Normalization


class SquareImage(Struct, frozen=True, array_like=True, tag="square_image"):
    """CLIP: resized to a shortest edge, then the middle square. Gives uint8 [side, side, 3]."""

    short: int
    side: int
    patch: int
    extra_tokens: int
    resample: int
    tone: Normalization


class AnyresImage(Struct, frozen=True, array_like=True, tag="anyres_image"):
    """LLaVA-NeXT: the whole picture and tiles of it, each a CLIP square.

    Gives uint8 [tiles, side, side, 3], the whole first; grid is the picture's (height, width).
    """

    pinpoints: tuple[tuple[int, int], ...]  # (height, width) that the tiles may cover
    square: SquareImage  # of each tile


class TiledImage(Struct, frozen=True, array_like=True, tag="tiled_image"):
    """Llama 4: tiles of the picture that fits best, then the whole in one if there are several.

    Gives uint8 [tiles, side, side, 3]; grid (rows, columns) in tiles.
    """

    side: int
    max_tiles: int
    resize_to_max_canvas: bool
    tile_tokens: int
    resample: int
    tone: Normalization


class FrameSampling(Struct, frozen=True, array_like=True):
    """Which frames of a video the model gets.

    ``rule`` names the stock processor whose arithmetic decides: "qwen2" (a whole number of temporal
    patches), "qwen3" (evenly with both ends), "even" (a fixed count), "rate" (as "even", by fps).
    """

    rule: str
    fps: float  # not for "even"
    count: int  # so many frames, with "rate" at most; 0: by fps, with "even" all
    least: int
    most: int
    patch: int  # frames in a temporal patch


class GridVideo(Struct, frozen=True, array_like=True, tag="grid_video"):
    """Qwen-VL: frames resized alike, to whole merged patches.

    Gives uint8 [frames, height, width, 3], a whole number of temporal patches (the last frame
    repeated); grid (patches in time, rows, columns); times: of each temporal patch, in seconds.
    ``with_audio``: a second array is the container's audio track, prepared by the audio recipe.
    """

    frames: FrameSampling
    patch: int
    merge: int
    min_pixels: int
    max_pixels: int
    per_frame: bool  # the pixel limits are for one frame; else for all of them
    resample: int
    tone: Normalization
    with_audio: bool = False


class SquareVideo(Struct, frozen=True, array_like=True, tag="square_video"):
    """LLaVA-NeXT-Video: every frame a CLIP square, pooled to ``frame_tokens`` rows.

    Gives uint8 [frames, side, side, 3]; grid (frames,).
    """

    frames: FrameSampling
    square: SquareImage
    frame_tokens: int


class MelAudio(Struct, frozen=True, array_like=True, tag="mel_audio"):
    """Whisper's log-mel spectrum of sound that silence follows.

    Gives float32 [mels, frames + tail]: a frame for every hop that begins within the sound, and
    then ``tail`` frames more for towers whose first layers look beyond the end of it.
    """

    rate: int
    fft: int
    hop: int
    mels: int
    max_frames: int  # that the model was trained for: longer sound is refused
    tail: int = 0


class EmbedsFormat(Struct, frozen=True, array_like=True, tag="embeds"):
    """What precomputed embeddings must look like: [tokens, width], and a grid where one is needed.

    tokens is the grid's product over merge squared. With ``tile`` the grid is (rows, columns) of
    tiles of ``tile`` tokens each; a picture of several tiles has one more for the whole picture.
    """

    width: int
    dtype: str  # that the encoder gives
    merge: int = 0  # 0: no grid
    tile: int = 0  # 0: no tiles


class MediaOptions(Struct, frozen=True, array_like=True):
    """What a request changes in the recipe of one of its items; 0 and None change nothing."""

    num_frames: int = 0  # of a video
    fps: float = 0.0  # at which frames of a video are sampled; with num_frames: the fewer of both
    min_pixels: int = 0
    max_pixels: int = 0
    use_audio_in_video: bool | None = None
    pixel_cap: int = 0  # a hint, for recipes that can follow it: most pixels of an image


ImageRecipe = GridImage | SquareImage | AnyresImage | TiledImage
VideoRecipe = GridVideo | SquareVideo
AudioRecipe = MelAudio


class Recipes(Struct, frozen=True, array_like=True, tag=5):
    """The recipes of one model. Media of a kind without a recipe are refused."""

    revision: str  # of model and processor settings: part of every media key
    image: ImageRecipe | None = None
    video: VideoRecipe | None = None
    audio: AudioRecipe | None = None
    image_embeds: EmbedsFormat | None = None
    video_embeds: EmbedsFormat | None = None
    audio_embeds: EmbedsFormat | None = None
