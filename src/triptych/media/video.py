"""From a video file to the frames that a model looks at: 8-bit pixels, sampled and resized.

The packets are read first, without decoding: they alone say how many frames there are and when
these are shown; what the header claims decides nothing. Then as few of them are decoded as give
the wanted frames, and each frame is resized as it comes. Runs in the sandbox; knows no model.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import av
import numpy as np
from av.container import InputContainer
from av.packet import Packet
from av.stream import Disposition
from av.video.frame import VideoFrame
from av.video.stream import VideoStream
from numpy.typing import NDArray

from triptych.config import Limits
from triptych.errors import ImageTooLarge, InvalidMedia, TooManyFrames
from triptych.media import audio, frames, grid
from triptych.media.container import VIDEO_CODECS, VIDEO_CONTAINERS, codec, opened
from triptych.media.resize import resize
from triptych.messages import MediaMeta
from triptych.recipe import Frames, GridVideo, Recipes, SquareVideo, VideoRecipe

Pixels = NDArray[np.uint8]
Shape = Callable[[int, int, int], "Cut"]

_RATES = (1e-3, 1e3)  # frames a second that a file may have: outside, its times are forged
_LONGEST = 24 * 3600.0  # seconds


@dataclass(frozen=True, slots=True)
class Cut:
    """What is made of each frame: resized to height and width, then the middle of that."""

    height: int
    width: int
    rows: int
    columns: int

    def of(self, pixels: Pixels, resample: int) -> Pixels:
        whole = resize(pixels, self.height, self.width, resample)
        top, left = (self.height - self.rows) // 2, (self.width - self.columns) // 2
        return whole[top : top + self.rows, left : left + self.columns]


@dataclass(frozen=True, slots=True)
class Taken:
    """Frames as the encoder gets them, and where in the clip they come from."""

    pixels: Pixels  # [frames, rows, columns, 3], whole temporal patches
    indices: list[int]
    total: int
    rate: float


class _Irregular(Exception):
    """The decoder gives other frames than the packets promise: only decoding all will tell."""


def prepare(
    data: memoryview, recipe: VideoRecipe, recipes: Recipes, limits: Limits
) -> tuple[MediaMeta, list[NDArray[Any]], int]:
    """The frames that the recipe asks for, uint8 [frames, rows, columns, 3]; a sound track's
    spectrum after them where the recipe wants it. The media key is left out."""
    if isinstance(recipe, SquareVideo):
        return _square(data, recipe, limits)
    taken = take(data, recipe.frames, _grid(recipe), recipe.resample, limits)
    count, rows, columns, _ = taken.pixels.shape
    shape = (count // recipe.frames.patch, rows // recipe.patch, columns // recipe.patch)
    cost = shape[0] * shape[1] * shape[2]
    seen, sound = cost // recipe.merge**2, 0
    arrays: list[NDArray[Any]] = [taken.pixels]
    if recipe.sound and recipes.audio is not None:
        wave = audio.listen(data, VIDEO_CONTAINERS, recipes.audio, limits)
        if wave is not None:
            spectrum, sound = audio.heard(wave, recipes.audio)
            arrays.append(spectrum)
            cost += spectrum.shape[1]
    times = frames.times(recipe.frames, taken.indices, taken.total, taken.rate)
    return MediaMeta(b"", seen + sound, shape, "video", times, sound), arrays, cost


def _square(
    data: memoryview, recipe: SquareVideo, limits: Limits
) -> tuple[MediaMeta, list[NDArray[Any]], int]:
    square = recipe.square

    def shape(count: int, height: int, width: int) -> Cut:
        short, long = min(height, width), max(height, width)
        edge = int(square.short * long / short)
        wide = (square.short, edge) if height <= width else (edge, square.short)
        return Cut(*wide, square.side, square.side)

    taken = take(data, recipe.frames, shape, square.resample, limits)
    count = len(taken.pixels)
    times = frames.times(recipe.frames, taken.indices, taken.total, taken.rate)
    meta = MediaMeta(b"", count * recipe.frame_tokens, (count,), "video", times)
    return meta, [taken.pixels], count * (square.side // square.patch) ** 2


def _grid(recipe: GridVideo) -> Shape:
    unit, low, high = recipe.patch * recipe.merge, recipe.min_pixels, recipe.max_pixels
    patch = recipe.frames.patch

    def shape(count: int, height: int, width: int) -> Cut:
        if recipe.per_frame:
            rows, columns = grid.fit(height, width, unit, low, high)
        else:
            if min(height, width) < unit:  # the stock rule enlarges these before all else
                grow = max(unit / height, unit / width)
                height, width = int(height * grow), int(width * grow)
            count = max(count, patch)
            padded = round(count / patch) * patch
            rows, columns = grid.fit(height, width, unit, low, high, count, padded)
        return Cut(rows, columns, rows, columns)

    return shape


def take(data: memoryview, rule: Frames, shape: Shape, resample: int, limits: Limits) -> Taken:
    """The frames that ``rule`` chooses, each resized; the last repeated to a whole patch."""
    try:
        return _take(data, rule, shape, resample, limits, _seek)
    except _Irregular:
        return _take(data, rule, shape, resample, limits, _walk)


def _take(
    data: memoryview,
    rule: Frames,
    shape: Shape,
    resample: int,
    limits: Limits,
    decode: Callable[[Clip, list[int]], Iterator[VideoFrame]],
) -> Taken:
    with opened(data, "video", VIDEO_CONTAINERS, limits) as container:
        clip = read(container, limits, len(data))
        total = len(clip.shown) if decode is _seek else _count(clip)
        indices = frames.choose(rule, total, clip.rate)
        if len(indices) > limits.video_sampled:
            raise TooManyFrames(
                f"{len(indices)} frames of the video would be looked at: "
                f"{limits.video_sampled} is the most. Send a shorter video."
            )
        pixels: Pixels | None = None
        cut = size = None
        for number, frame in enumerate(decode(clip, indices)):
            if pixels is None or cut is None:
                size = (frame.height, frame.width)
                cut = shape(len(indices), *size)
                padded = -(-len(indices) // rule.patch) * rule.patch
                pixels = np.empty((padded, cut.rows, cut.columns, 3), np.uint8)
            if (frame.height, frame.width) != size:
                raise InvalidMedia("The video's frames change their size midway.")
            pixels[number] = cut.of(rgb(frame), resample)
    assert pixels is not None
    pixels[len(indices) :] = pixels[len(indices) - 1]
    return Taken(pixels, indices, total, clip.rate)


def rgb(frame: VideoFrame) -> Pixels:
    """8-bit RGB [height, width, 3], converted as PyAV does unasked: swscale, bilinear chroma."""
    return np.asarray(frame.to_ndarray(format="rgb24", threads=1), np.uint8)


@dataclass(frozen=True, slots=True)
class Clip:
    """A video track's packets in the order of decoding, and what they say of its frames."""

    stream: VideoStream
    packets: list[Packet[VideoStream]]
    shown: list[int]  # time stamps of its frames, in the order of showing
    rate: float  # frames a second


def read(container: InputContainer, limits: Limits, size: int) -> Clip:
    """The first video track, demuxed and not decoded. ``size``: bytes of the file."""
    cover = Disposition.attached_pic
    tracks = [track for track in container.streams.video if not track.disposition & cover]
    if not tracks:
        raise InvalidMedia("The file has no video in it.")
    stream = tracks[0]
    name = codec(stream, VIDEO_CODECS, "video")
    _check_size(stream, limits)
    stream.codec_context.thread_count = 1
    packets: list[Packet[VideoStream]] = []
    shown: list[int | None] = []
    weight = 0
    for number, packet in enumerate(container.demux(stream)):
        if number > limits.video_frames:
            raise TooManyFrames(
                f"The video has more than {limits.video_frames} frames. Send a shorter one."
            )
        if not packet.size:  # the last, which only says that there are no more
            continue
        weight += packet.size
        if weight > 4 * size + (1 << 20):  # samples that overlap, or unpack to much more
            raise InvalidMedia("The video's packets are larger than its file.")
        packets.append(packet)
        if not packet.is_discard and (name != "vp8" or memoryview(packet)[0] & 0x10):
            shown.append(packet.pts)
    if not shown:
        raise InvalidMedia("The video has no frame in it.")
    stamps = sorted(stamp for stamp in shown if stamp is not None)
    return Clip(stream, packets, stamps, _rate(container, stream, stamps, len(shown)))


def _check_size(stream: VideoStream, limits: Limits) -> None:
    width, height = stream.codec_context.width, stream.codec_context.height
    if width * height > limits.image_pixels:
        raise ImageTooLarge(
            f"The video's frames have {width} x {height} pixels: {limits.image_pixels} is the "
            "most. Send it smaller."
        )
    if width < 1 or height < 1:
        raise InvalidMedia("The video's frames have no size.")


def _rate(container: InputContainer, stream: VideoStream, stamps: list[int], count: int) -> float:
    """Frames a second, by the packets; the header's rounder number if it says the same."""
    said = float(stream.average_rate or 0)
    unit = float(stream.time_base or 0)
    span = (stamps[-1] - stamps[0]) * unit if stamps else 0.0
    if span <= 0:  # one frame, or frames without times
        return said if _RATES[0] <= said <= _RATES[1] else 24.0
    rate = (count - 1) / span
    lasts = count / rate
    told = float(stream.duration * unit) if stream.duration is not None else 0.0
    if not told and len(container.streams) == 1 and container.duration is not None:
        told = container.duration / av.time_base
    if not _RATES[0] <= rate <= _RATES[1] or lasts > _LONGEST or (told and _forged(told, lasts)):
        raise InvalidMedia(
            f"The video says that it lasts {told or lasts:g} seconds, and has {count} frames in "
            f"{span:g} seconds."
        )
    return said if abs(said - rate) < 0.01 * rate else rate


def _forged(told: float, lasts: float) -> bool:
    return max(told, lasts) > 4 * min(told, lasts) + 10


def _seek(clip: Clip, indices: list[int]) -> Iterator[VideoFrame]:
    """The frames of these indices, decoding from the key frame before each where that is nearer.

    The packets are in memory: to seek is to go on with another one.
    """
    if len(set(clip.shown)) < len(clip.packets) - _hidden(clip):
        raise _Irregular
    wanted = {clip.shown[index] for index in indices}
    todo = deque(sorted(wanted))
    keys = [
        (packet.pts, at)
        for at, packet in enumerate(clip.packets)
        if packet.is_keyframe and packet.pts is not None
    ]
    at = 0
    while todo:
        start = max((place for stamp, place in keys if stamp <= todo[0]), default=0)
        if start > at:
            clip.stream.codec_context.flush_buffers()
            at = start
        for frame in _decode(clip, at, wanted):
            if frame.pts is None or (todo and frame.pts > todo[0]):
                raise _Irregular
            if todo and frame.pts == todo[0]:
                todo.popleft()
                yield frame
        if at >= len(clip.packets) and todo:
            raise _Irregular
        at += 1


def _hidden(clip: Clip) -> int:
    return len(clip.packets) - len(clip.shown)


def _decode(clip: Clip, at: int, wanted: set[int]) -> list[VideoFrame]:
    """What comes out of the decoder for one packet; for the place after the last, the rest."""
    if at >= len(clip.packets):
        return clip.stream.decode(None)
    packet = clip.packets[at]
    if clip.stream.codec_context.name == "h264":
        # frames that no other frame needs are left out unless they are wanted themselves
        skip = packet.pts not in wanted
        clip.stream.codec_context.skip_frame = "NONREF" if skip else "DEFAULT"
    return clip.stream.decode(packet)


def _walk(clip: Clip, indices: list[int]) -> Iterator[VideoFrame]:
    """The frames of these indices, counted as they come out of the decoder."""
    wanted, last = set(indices), indices[-1]
    for number, frame in enumerate(_all(clip)):
        if number in wanted:
            yield frame
        if number >= last:
            return
    raise InvalidMedia("The video's frames cannot be counted.")


def _count(clip: Clip) -> int:
    count = sum(1 for _ in _all(clip))
    clip.stream.codec_context.flush_buffers()
    if not count:
        raise InvalidMedia("The video has no frame that can be decoded.")
    return count


def _all(clip: Clip) -> Iterator[VideoFrame]:
    for packet in clip.packets:
        yield from clip.stream.decode(packet)
    yield from clip.stream.decode(None)
