"""From a video file to the frames that a model looks at: 8-bit pixels, sampled and resized.

The packets are read first, without decoding: they alone say how many frames there are and when
these are shown; what the header claims decides nothing. Then as few of them are decoded as give
the wanted frames, and each frame is resized as it comes. Runs in the sandbox; knows no model.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, cast

import av
import numpy as np
from av.container import InputContainer
from av.packet import Packet
from av.stream import Disposition
from av.video.frame import VideoFrame
from av.video.reformatter import VideoReformatter
from av.video.stream import VideoStream
from numpy.typing import NDArray

from triptych.config import Limits
from triptych.errors import ImageTooLarge, InvalidMedia, TooManyFrames
from triptych.media import audio, frames, grid, headers
from triptych.media.container import VIDEO_CODECS, VIDEO_CONTAINERS, codec, opened
from triptych.media.resize import resize
from triptych.messages import MediaMeta
from triptych.recipe import Frames, GridVideo, Recipes, SquareVideo, VideoRecipe

Pixels = NDArray[np.uint8]
Shape = Callable[[int, int, int], "Cut"]

_RATES = (1e-3, 1e3)  # frames a second that a file may have: outside, its times are forged


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
        if long > grid.MAX_ASPECT * short:
            raise InvalidMedia(
                f"The video's frames are {width} x {height}: one side is over {grid.MAX_ASPECT} "
                "times the other. Crop or pad them."
            )
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
    with opened(data, "video", VIDEO_CONTAINERS, limits) as container:
        clip = read(container, data, limits)
        try:
            total = clip.frames
            indices = _choose(rule, clip, total, limits)
            pixels = fill(_pictures(seek(clip, indices)), len(indices), rule, shape, resample)
        except _Irregular:
            total = _count(clip)
            indices = _choose(rule, clip, total, limits)
            pixels = fill(_pictures(walk(clip, indices)), len(indices), rule, shape, resample)
    return Taken(pixels, indices, total, clip.rate)


def _choose(rule: Frames, clip: Clip, total: int, limits: Limits) -> list[int]:
    indices = frames.choose(rule, total, clip.rate)
    if len(indices) > limits.video_sampled:
        raise TooManyFrames(
            f"{len(indices)} frames of the video would be looked at: {limits.video_sampled} is "
            "the most. Send a shorter video."
        )
    return indices


def fill(
    pictures: Iterator[Pixels], count: int, rule: Frames, shape: Shape, resample: int
) -> Pixels:
    """``count`` pictures of one size [height, width, 3], resized one by one as they come."""
    first = next(pictures)
    cut = shape(count, *first.shape[:2])
    whole = -(-count // rule.patch) * rule.patch
    pixels = np.empty((whole, cut.rows, cut.columns, 3), np.uint8)
    pixels[0] = cut.of(first, resample)
    for number, picture in enumerate(pictures, 1):
        if picture.shape != first.shape:
            raise InvalidMedia("The video's frames change their size midway.")
        pixels[number] = cut.of(picture, resample)
    pixels[count:] = pixels[count - 1]
    return pixels


def _pictures(decoded: Iterator[VideoFrame]) -> Iterator[Pixels]:
    """8-bit RGB [height, width, 3], converted as PyAV does unasked: swscale, bilinear chroma."""
    swscale = VideoReformatter()
    for frame in decoded:
        made = swscale.reformat(frame, format="rgb24", threads=1)
        yield np.asarray(made.to_ndarray(), np.uint8)


@dataclass(frozen=True, slots=True)
class Clip:
    """A video track's packets in the order of decoding, and what they say of its frames."""

    stream: VideoStream
    packets: list[Packet[VideoStream]]
    shown: list[int]  # time stamps of its frames, in the order of showing
    frames: int  # that are shown, with a time stamp or without
    rate: float  # frames a second


def read(container: InputContainer, data: memoryview, limits: Limits) -> Clip:
    """The first video track of the file, demuxed and not decoded."""
    cover = Disposition.attached_pic
    tracks = [track for track in container.streams.video if not track.disposition & cover]
    if not tracks:
        raise InvalidMedia("The file has no video in it.")
    stream = tracks[0]
    name = codec(stream, VIDEO_CODECS, "video")
    _check_size(stream, limits)
    stream.codec_context.thread_count = 1
    stream.codec_context.options = {"max_pixels": str(limits.image_pixels)}  # of any later frame
    packets: list[Packet[VideoStream]] = []
    shown: list[int | None] = []
    count, weight, end = 0, 0, 0.0
    for packet in container.demux():
        if packet.pts is not None:
            end = max(end, float((packet.pts + (packet.duration or 0)) * packet.time_base))
        if packet.stream_index != stream.index:
            continue
        if packet.dts is None and not packet.size:  # only says that there are no more
            continue
        count += 1
        if count > limits.video_frames:
            raise TooManyFrames(
                f"The video has more than {limits.video_frames} frames. Send a shorter one."
            )
        if not packet.size:
            continue
        weight += packet.size
        if weight > 4 * len(data) + (1 << 20):  # samples that overlap, or unpack to much more
            raise InvalidMedia("The video's packets are larger than its file.")
        packets.append(cast("Packet[VideoStream]", packet))
        if not packet.is_discard and (name != "vp8" or memoryview(packet)[0] & 0x10):
            shown.append(packet.pts)
    if not shown:
        raise InvalidMedia("The video has no frame in it.")
    told = headers.movie_seconds(data) or (container.duration or 0) / av.time_base
    if told and max(told, end) > 4 * min(told, end) + 10:
        raise InvalidMedia(f"The video says that it lasts {told:g} seconds, and lasts {end:g}.")
    stamps = sorted(stamp for stamp in shown if stamp is not None)
    return Clip(stream, packets, stamps, len(shown), _rate(stream, stamps))


def _check_size(stream: VideoStream, limits: Limits) -> None:
    width, height = stream.codec_context.width, stream.codec_context.height
    if width * height > limits.image_pixels:
        raise ImageTooLarge(
            f"The video's frames have {width} x {height} pixels: {limits.image_pixels} is the "
            "most. Send it smaller."
        )
    if width < 1 or height < 1:
        raise InvalidMedia("The video's frames have no size.")


def _rate(stream: VideoStream, stamps: list[int]) -> float:
    """Frames a second, by the packets; the header's rounder number if it says the same."""
    said = float(stream.average_rate or 0)
    span = float((stamps[-1] - stamps[0]) * (stream.time_base or 0)) if stamps else 0.0
    if span <= 0:  # one frame, or frames without times
        return said if _RATES[0] <= said <= _RATES[1] else 24.0
    rate = (len(stamps) - 1) / span
    if not _RATES[0] <= rate <= _RATES[1]:
        raise InvalidMedia(f"The video has {len(stamps)} frames in {span:g} seconds.")
    return said if abs(said - rate) < 0.01 * rate else rate


def seek(clip: Clip, indices: list[int]) -> Iterator[VideoFrame]:
    """The frames of these indices, decoding from the key frame before each where that is nearer.

    The packets are in memory: to seek is to go on with another one.
    """
    if len(set(clip.shown)) < clip.frames:  # some without a time, or two at one
        raise _Irregular
    wanted = {clip.shown[index] for index in indices}
    todo = deque(sorted(wanted))
    stamps, places = _keys(clip)
    at = 0
    while todo:
        # from there on all is decoded that is shown then or later
        start = places[bisect_right(stamps, todo[0])]
        if start > at:
            clip.stream.codec_context.flush_buffers()
            at = start
        last = todo[0]
        while todo and todo[0] == last:
            if at > len(clip.packets):
                raise _Irregular
            for frame in _decode(clip, at, wanted):
                if frame.pts is None or (todo and frame.pts > todo[0]):
                    raise _Irregular
                if todo and frame.pts == todo[0]:
                    todo.popleft()
                    yield frame
            at += 1


def _keys(clip: Clip) -> tuple[list[int], list[int]]:
    """When key frames are shown, rising; and the last of the first 0, 1, 2 ... in decoding."""
    keys = sorted(
        (packet.pts, at)
        for at, packet in enumerate(clip.packets)
        if packet.is_keyframe and packet.pts is not None
    )
    places = accumulate((at for _, at in keys), max, initial=0)
    return [stamp for stamp, _ in keys], list(places)


def _decode(clip: Clip, at: int, wanted: set[int]) -> list[VideoFrame]:
    """What comes out of the decoder for one packet; for the place after the last, the rest."""
    packet = clip.packets[at] if at < len(clip.packets) else None
    if packet is not None and clip.stream.codec_context.name == "h264":
        # frames that no other frame needs are left out unless they are wanted themselves
        skip = packet.pts not in wanted
        clip.stream.codec_context.skip_frame = "NONREF" if skip else "DEFAULT"
    try:
        return clip.stream.decode(packet)
    except av.FFmpegError:  # is it the file, or was that no key frame?
        raise _Irregular from None


def walk(clip: Clip, indices: list[int]) -> Iterator[VideoFrame]:
    """The frames of these indices, counted as they come out of the decoder."""
    wanted = set(indices)
    yield from (frame for number, frame in enumerate(_all(clip)) if number in wanted)


def _count(clip: Clip) -> int:
    count = sum(1 for _ in _all(clip))
    if not count:
        raise InvalidMedia("The video has no frame that can be decoded.")
    return count


def _all(clip: Clip) -> Iterator[VideoFrame]:
    clip.stream.codec_context.skip_frame = "DEFAULT"
    clip.stream.codec_context.flush_buffers()
    for packet in clip.packets:
        yield from clip.stream.decode(packet)
    yield from clip.stream.decode(None)
