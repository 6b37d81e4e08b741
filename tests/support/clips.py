"""Videos and sounds for tests by number: always the same, unlike every other.

A frame's number can be read from its colours, so that a test sees which frames it got. A sound is
a chord of exact sines.
"""

from __future__ import annotations

import io
import os
from fractions import Fraction

import av
import numpy as np

VIDEOS = {  # form: (container, codec, its settings)
    "mp4": ("mp4", "libx264", {"preset": "ultrafast", "x264-params": "scenecut=0"}),
    "mkv": ("matroska", "libx264", {"preset": "ultrafast", "x264-params": "scenecut=0"}),
    "webm": ("webm", "libvpx", {"deadline": "realtime", "cpu-used": "8"}),
    "vp9": ("webm", "libvpx-vp9", {"deadline": "realtime", "cpu-used": "8"}),
    "hevc": ("mp4", "libx265", {"preset": "ultrafast", "x265-params": "log-level=none:pools=1"}),
    "av1": ("mp4", "libsvtav1", {"preset": "12", "svtav1-params": "lp=1"}),
    "mpeg4": ("mp4", "mpeg4", {}),
    "mjpeg": ("mov", "mjpeg", {}),
}
SOUNDS = {  # form: (container, codec)
    "wav": ("wav", "pcm_s16le"),
    "mp3": ("mp3", "libmp3lame"),
    "flac": ("flac", "flac"),
    "opus": ("ogg", "libopus"),
    "m4a": ("ipod", "aac"),
}


def colour(number: int, frame: int) -> tuple[int, int, int]:
    """The background of a frame: far from that of the frames around it."""
    return (
        40 * (frame % 5) + 30,
        40 * (frame // 5 % 5) + 30,
        40 * ((frame // 25 + number) % 5) + 30,
    )


def frame_of(pixels: np.ndarray, number: int) -> int:
    """Which of the first 125 frames of the clip of this number is shown, [h, w, 3]."""
    red, green, blue = (
        round((float(value) - 30) / 40) for value in pixels[: len(pixels) // 2].mean((0, 1))
    )
    return red + 5 * green + 25 * ((blue - number) % 5)


def draw(number: int, frame: int, width: int, height: int) -> np.ndarray:
    """uint8 [height, width, 3]: plain above, below a bar that moves and bears the number."""
    pixels = np.empty((height, width, 3), np.uint8)
    pixels[:] = colour(number, frame)
    left = (7 * frame + 13 * number) % max(1, width - 8)
    pixels[height * 2 // 3 :, left : left + 8] = (255, number * 37 % 256, 255 - number * 11 % 256)
    return pixels


def video(
    number: int,
    form: str = "mp4",
    *,
    frames: int = 50,
    width: int = 96,
    height: int = 64,
    fps: Fraction | int = 25,
    gop: int = 12,
    bframes: int = 0,
    stamps: list[int] | None = None,
    sound: float = 0.0,
    **settings: str,
) -> bytes:
    """The clip of this number. ``stamps``: when its frames are shown, in milliseconds; ``sound``:
    seconds of an audio track."""
    container, codec, common = VIDEOS[form]
    file = io.BytesIO()
    with av.open(file, "w", format=container) as out:
        stream = out.add_stream(codec, rate=fps, options={**common, **settings})
        stream.width, stream.height = width, height
        stream.pix_fmt = "yuvj420p" if codec == "mjpeg" else "yuv420p"
        context = stream.codec_context
        context.gop_size, context.thread_count = gop, 1
        if bframes:
            context.max_b_frames = bframes
        if stamps is not None:
            context.time_base = Fraction(1, 1000)
        track = _add_sound(out, "libopus" if container == "webm" else "aac") if sound else None
        for index in range(frames):
            picture = av.VideoFrame.from_ndarray(draw(number, index, width, height), "rgb24")
            picture.pts = index if stamps is None else stamps[index]
            picture.time_base = 1 / Fraction(fps) if stamps is None else Fraction(1, 1000)
            out.mux(stream.encode(picture))
        out.mux(stream.encode(None))
        if track is not None:
            _play(out, track, wave(number, sound, 48000), 48000)
    if codec == "libsvtav1":
        # As root it makes this process real-time, and with it every server that a test starts.
        os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))
    return file.getvalue()


def wave(number: int, seconds: float, rate: int = 16000) -> np.ndarray:
    """float32 [samples]: the chord of this number."""
    at = np.arange(round(seconds * rate)) / rate
    chord = sum(np.sin(2 * np.pi * tone * at) for tone in tones(number))
    return (0.2 * chord).astype(np.float32)


def tones(number: int) -> tuple[float, float, float]:
    """In hertz."""
    return 200.0 + 10 * number, 700.0 + 17 * number, 1500.0 + 29 * number


def sound(
    number: int, form: str = "wav", *, seconds: float = 1.0, rate: int = 48000, channels: int = 1
) -> bytes:
    """The sound of this number; of several channels, the second is silent."""
    container, codec = SOUNDS[form]
    file = io.BytesIO()
    with av.open(file, "w", format=container) as out:
        track = _add_sound(out, codec, rate, channels)
        _play(out, track, wave(number, seconds, rate), rate, channels)
    return file.getvalue()


def _add_sound(out, codec, rate=48000, channels=1):
    track = out.add_stream(codec, rate=rate, layout="stereo" if channels == 2 else "mono")
    track.codec_context.thread_count = 1
    return track


def _play(out, track, samples, rate, channels=1) -> None:
    lanes = np.zeros((channels, len(samples)), np.float32)
    lanes[0] = samples
    frame = av.AudioFrame.from_ndarray(
        np.ascontiguousarray(lanes), "fltp", "stereo" if channels == 2 else "mono"
    )
    frame.sample_rate, frame.pts = rate, 0
    frame.time_base = Fraction(1, rate)
    context = track.codec_context
    fitted = av.AudioResampler(
        context.format, context.layout, context.sample_rate, context.frame_size or None
    )
    for part in [*fitted.resample(frame), *fitted.resample(None)]:
        out.mux(track.encode(part))
    out.mux(track.encode(None))
