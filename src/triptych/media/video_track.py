"""A video track: its packets, which say what frames there are, and the decoding of some of them.

The packets are read first, without decoding: they alone say how many frames there are and when
these are shown; what the header claims decides nothing. Then as few of them are decoded as give
the wanted frames. Runs in the sandbox; knows no model and no size but the file's own.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import deque
from collections.abc import Iterator
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
from triptych.media import headers
from triptych.media.container import PYAV, VIDEO_CODECS, check_codec

_RATES = (1e-3, 1e3)  # frames a second that a file may have: outside, its times are forged
_THREADS: dict[str, Any] = {"threads": 1} if PYAV >= 17 else {}  # before, swscale had but one
_SPARE = 1 << 20  # bytes that packets may have beyond several times the file's


class IrregularTrack(Exception):
    """The decoder gives other frames than the packets promise: only decoding all will tell."""


@dataclass(frozen=True, slots=True)
class VideoTrack:
    """A video track's packets in the order of decoding, and what they say of its frames."""

    stream: VideoStream
    packets: list[Packet[VideoStream]]
    shown: list[int]  # time stamps of its frames, in the order of showing
    frames: int  # that are shown, with a time stamp or without
    rate: float  # frames a second


def read_track(container: InputContainer, data: memoryview, limits: Limits) -> VideoTrack:
    """The first video track of the file, demuxed and not decoded."""
    cover = Disposition.attached_pic
    tracks = [track for track in container.streams.video if not track.disposition & cover]
    if not tracks:
        raise InvalidMedia("The file has no video in it.")
    stream = tracks[0]
    name = check_codec(stream, VIDEO_CODECS, "video")
    _check_size(stream, limits)
    stream.codec_context.thread_count = 1
    stream.codec_context.options = {"max_pixels": str(limits.image_pixels)}  # of any later frame
    packets: list[Packet[VideoStream]] = []
    shown: list[int | None] = []
    count, weight, start, end = 0, 0, math.inf, 0.0
    for packet in container.demux():
        if packet.pts is not None:
            start = min(start, float(packet.pts * packet.time_base))
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
        if weight > 4 * len(data) + _SPARE:  # samples that overlap, or unpack to much more
            raise InvalidMedia("The video's packets are larger than its file.")
        packets.append(cast("Packet[VideoStream]", packet))
        if not packet.is_discard and (name != "vp8" or memoryview(packet)[0] & 0x10):
            shown.append(packet.pts)
    if not shown:
        raise InvalidMedia("The video has no frame in it.")
    told = headers.movie_seconds(data) or (container.duration or 0) / av.time_base
    _check_duration(told, max(0.0, end - start), end)
    stamps = sorted(stamp for stamp in shown if stamp is not None)
    return VideoTrack(stream, packets, stamps, len(shown), _rate(stream, stamps))


def _check_size(stream: VideoStream, limits: Limits) -> None:
    width, height = stream.codec_context.width, stream.codec_context.height
    if width * height > limits.image_pixels:
        raise ImageTooLarge(
            f"The video's frames have {width} x {height} pixels: {limits.image_pixels} is the "
            "most. Send it smaller."
        )
    if width < 1 or height < 1:
        raise InvalidMedia("The video's frames have no size.")


def _check_duration(told: float, lasts: float, end: float) -> None:
    """``told``: by the header, 0 if it says nothing; the others by the packets of all tracks.

    A clip that was cut out of a longer one may tell its end, and there are honest mistakes.
    """
    if told and all(max(told, real) > 4 * min(told, real) + 10 for real in (lasts, end)):
        raise InvalidMedia(f"The video says that it lasts {told:g} seconds, and lasts {lasts:g}.")


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


def seek_frames(clip: VideoTrack, indices: list[int]) -> Iterator[VideoFrame]:
    """The frames of these indices, decoding from the key frame before each where that is nearer.

    The packets are in memory: to seek is to go on with another one.
    """
    if len(set(clip.shown)) < clip.frames:  # some without a time, or two at one
        raise IrregularTrack
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
                raise IrregularTrack
            for frame in _decode(clip, at, wanted):
                if frame.pts is None or (todo and frame.pts > todo[0]):
                    raise IrregularTrack
                if todo and frame.pts == todo[0]:
                    todo.popleft()
                    yield frame
            at += 1


def _keys(clip: VideoTrack) -> tuple[list[int], list[int]]:
    """When key frames are shown, rising; and the last of the first 0, 1, 2 ... in decoding."""
    keys = sorted(
        (packet.pts, at)
        for at, packet in enumerate(clip.packets)
        if packet.is_keyframe and packet.pts is not None
    )
    places = accumulate((at for _, at in keys), max, initial=0)
    return [stamp for stamp, _ in keys], list(places)


def _decode(clip: VideoTrack, at: int, wanted: set[int]) -> list[VideoFrame]:
    """What comes out of the decoder for one packet; for the place after the last, the rest."""
    packet = clip.packets[at] if at < len(clip.packets) else None
    if packet is not None and clip.stream.codec_context.name == "h264":
        # frames that no other frame needs are left out unless they are wanted themselves
        skip = packet.pts not in wanted
        clip.stream.codec_context.skip_frame = "NONREF" if skip else "DEFAULT"
    try:
        return clip.stream.decode(packet)
    except av.FFmpegError:  # is it the file, or was that no key frame?
        raise IrregularTrack from None


def scan_frames(clip: VideoTrack, indices: list[int]) -> Iterator[VideoFrame]:
    """The frames of these indices, counted as they come out of the decoder."""
    wanted = set(indices)
    yield from (frame for number, frame in enumerate(_all(clip)) if number in wanted)


def count_frames(clip: VideoTrack) -> int:
    count = sum(1 for _ in _all(clip))
    if not count:
        raise InvalidMedia("The video has no frame that can be decoded.")
    return count


def _all(clip: VideoTrack) -> Iterator[VideoFrame]:
    clip.stream.codec_context.skip_frame = "DEFAULT"
    clip.stream.codec_context.flush_buffers()
    for packet in clip.packets:
        yield from clip.stream.decode(packet)
    yield from clip.stream.decode(None)


def to_rgb(decoded: Iterator[VideoFrame]) -> Iterator[NDArray[np.uint8]]:
    """8-bit RGB [height, width, 3], converted as PyAV does unasked: swscale, bilinear chroma."""
    swscale = VideoReformatter()
    for frame in decoded:
        made = swscale.reformat(frame, format="rgb24", **_THREADS)
        yield np.asarray(made.to_ndarray(), np.uint8)
