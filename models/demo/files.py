"""Media of samples as the files that clients send: PNG or JPEG, MP4, WAV.

Knows nothing of questions or models.
"""

from __future__ import annotations

import base64
import io
import wave
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import av
import numpy as np
from numpy.typing import NDArray
from PIL import Image

from models.demo.recipe.sample import RATE, Clip, Media, Picture, Sound
from triptych.messages import MediaKind

MIMES = {"png": "image/png", "jpg": "image/jpeg", "mp4": "video/mp4", "wav": "audio/wav"}
KINDS: dict[str, MediaKind] = {"png": "image", "jpg": "image", "mp4": "video", "wav": "audio"}
JPEG_QUALITY = 90
JPEG_EVERY = 4  # one picture in so many is a JPEG
# Few artefacts, and the same bytes on every machine: x264 with one thread decides nothing by time.
H264 = {"crf": "16", "preset": "veryfast", "x264-params": "log-level=none"}


@dataclass(frozen=True)
class File:
    form: str  # ending of its name
    data: bytes

    @property
    def kind(self) -> MediaKind:
        return KINDS[self.form]

    @property
    def part(self) -> dict[str, Any]:
        """Of a message."""
        url = f"data:{MIMES[self.form]};base64,{base64.b64encode(self.data).decode()}"
        return {"type": f"{self.kind}_url", f"{self.kind}_url": {"url": url}}


def file_of(media: Media, number: int = 0) -> File:
    """``number``: of the sample; it decides between PNG and JPEG."""
    match media:
        case Picture(pixels):
            jpeg = number % JPEG_EVERY == JPEG_EVERY - 1
            return File("jpg", _jpeg(pixels)) if jpeg else File("png", _png(pixels))
        case Clip(frames, fps):
            return File("mp4", _mp4(frames, fps))
        case Sound(samples):
            return File("wav", _wav(samples))


def _png(pixels: NDArray[np.uint8]) -> bytes:
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    return file.getvalue()


def _jpeg(pixels: NDArray[np.uint8]) -> bytes:
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "JPEG", quality=JPEG_QUALITY)
    return file.getvalue()


def _mp4(frames: NDArray[np.uint8], fps: float) -> bytes:
    """H.264 in 4:2:0 as nearly all clips are; an odd edge is repeated, for it takes even ones."""
    _, height, width, _ = frames.shape
    even = ((0, 0), (0, height % 2), (0, width % 2), (0, 0))
    frames = np.pad(frames, even, mode="edge")
    rate = Fraction(fps).limit_denominator(1001)
    file = io.BytesIO()
    with av.open(file, "w", format="mp4") as out:
        stream = out.add_stream("libx264", rate=rate, options=H264)
        stream.height, stream.width = frames.shape[1:3]
        stream.pix_fmt = "yuv420p"
        stream.codec_context.thread_count = 1
        for number, frame in enumerate(frames):
            picture = av.VideoFrame.from_ndarray(np.ascontiguousarray(frame), "rgb24")
            picture.pts, picture.time_base = number, 1 / rate
            out.mux(stream.encode(picture))
        out.mux(stream.encode(None))
    return file.getvalue()


def _wav(samples: NDArray[np.float32]) -> bytes:
    file = io.BytesIO()
    with wave.open(file, "wb") as out:
        out.setparams((1, 2, RATE, 0, "NONE", ""))
        out.writeframes(np.round(samples.clip(-1, 1) * 32767).astype("<i2").tobytes())
    return file.getvalue()
