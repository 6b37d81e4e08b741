"""A video track: reads its packets, then decodes as few of them as the wanted frames need.

The packets alone, read without decoding, say how many frames there are and when each is shown; the
header decides nothing. Runs in the sandbox; does not know models or resizing.
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
from triptych.media.container import PYAV, VIDEO_CODECS, check_codec, movie_seconds

_RATES = (1e-3, 1e3)  # frames per second that a file may have: outside, its times are forged
_THREADS: dict[str, Any] = {"threads": 1} if PYAV >= 17 else {}  # before 17 swscale had only one
_SPARE = 1 << 20  # bytes that packets may have beyond several times the file's size


class IrregularTrack(Exception):
    """The decoder yields other frames than the packets promise: all have to be decoded."""


@dataclass(frozen=True, slots=True)
class VideoTrack:
    """A video track's packets in the order of decoding, and what they say of its frames."""

    stream: VideoStream
    packets: list[Packet[VideoStream]]
    shown: list[int]  # time stamps of the frames, in presentation order
    frames: int  # presented ones, with a time stamp or without
    rate: float  # frames per second


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
        if packet.dts is None and not packet.size:  # marks the end
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
    claimed = movie_seconds(data) or (container.duration or 0) / av.time_base
    _check_duration(claimed, max(0.0, end - start), end)
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


def _check_duration(claimed: float, lasts: float, end: float) -> None:
    """``claimed``: by the header, 0 if it says nothing; the others by the packets of all tracks.

    Generous: the header of a clip that was cut out of a longer one may state its end.
    """
    if claimed and all(max(claimed, real) > 4 * min(claimed, real) + 10 for real in (lasts, end)):
        raise InvalidMedia(
            f"The video says that it lasts {claimed:g} seconds, and lasts {lasts:g}."
        )


def _rate(stream: VideoStream, stamps: list[int]) -> float:
    """Frames per second, by the packets; the header's rounder number if it agrees."""
    claimed = float(stream.average_rate or 0)
    span = float((stamps[-1] - stamps[0]) * (stream.time_base or 0)) if stamps else 0.0
    if span <= 0:  # one frame, or frames without times
        return claimed if _RATES[0] <= claimed <= _RATES[1] else 24.0
    rate = (len(stamps) - 1) / span
    if not _RATES[0] <= rate <= _RATES[1]:
        raise InvalidMedia(f"The video has {len(stamps)} frames in {span:g} seconds.")
    return claimed if abs(claimed - rate) < 0.01 * rate else rate


def seek_frames(track: VideoTrack, indices: list[int]) -> Iterator[VideoFrame]:
    """The frames of these indices, decoding from the key frame before each where that is nearer.

    The packets are in memory: seeking is continuing with another one.
    """
    if len(set(track.shown)) < track.frames:  # some without a time, or two at one
        raise IrregularTrack
    wanted = {track.shown[index] for index in indices}
    todo = deque(sorted(wanted))
    stamps, places = _keys(track)
    at = 0
    while todo:
        # decoding from this packet yields every frame that is shown then or later
        start = places[bisect_right(stamps, todo[0])]
        if start > at:
            track.stream.codec_context.flush_buffers()
            at = start
        last = todo[0]
        while todo and todo[0] == last:
            if at > len(track.packets):
                raise IrregularTrack
            for frame in _decode(track, at, wanted):
                if frame.pts is None or (todo and frame.pts > todo[0]):
                    raise IrregularTrack
                if todo and frame.pts == todo[0]:
                    todo.popleft()
                    yield frame
            at += 1


def _keys(track: VideoTrack) -> tuple[list[int], list[int]]:
    """Time stamps of the key frames, rising; and for the first 0, 1, 2 ... of them the index of the
    packet that is decoded last."""
    keys = sorted(
        (packet.pts, at)
        for at, packet in enumerate(track.packets)
        if packet.is_keyframe and packet.pts is not None
    )
    places = accumulate((at for _, at in keys), max, initial=0)
    return [stamp for stamp, _ in keys], list(places)


def _decode(track: VideoTrack, at: int, wanted: set[int]) -> list[VideoFrame]:
    """The frames that the decoder yields for one packet; after the last packet, the rest."""
    packet = track.packets[at] if at < len(track.packets) else None
    if packet is not None and track.stream.codec_context.name == "h264":
        # skip frames that no other frame refers to, unless they are wanted themselves
        skip = packet.pts not in wanted
        track.stream.codec_context.skip_frame = "NONREF" if skip else "DEFAULT"
    try:
        return track.stream.decode(packet)
    except av.FFmpegError:  # a damaged file, or the packet was not a real key frame
        raise IrregularTrack from None


def scan_frames(track: VideoTrack, indices: list[int]) -> Iterator[VideoFrame]:
    """The frames of these indices, counted as they leave the decoder: decodes everything."""
    wanted = set(indices)
    yield from (frame for number, frame in enumerate(_all(track)) if number in wanted)


def count_frames(track: VideoTrack) -> int:
    count = sum(1 for _ in _all(track))
    if not count:
        raise InvalidMedia("The video has no frame that can be decoded.")
    return count


def _all(track: VideoTrack) -> Iterator[VideoFrame]:
    track.stream.codec_context.skip_frame = "DEFAULT"
    track.stream.codec_context.flush_buffers()
    for packet in track.packets:
        yield from track.stream.decode(packet)
    yield from track.stream.decode(None)


def to_rgb(decoded: Iterator[VideoFrame]) -> Iterator[NDArray[np.uint8]]:
    """8-bit RGB [height, width, 3], with PyAV's default conversion: swscale, bilinear chroma."""
    swscale = VideoReformatter()
    for frame in decoded:
        converted = swscale.reformat(frame, format="rgb24", **_THREADS)
        yield np.asarray(converted.to_ndarray(), np.uint8)
