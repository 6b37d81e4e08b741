"""Good files of each kind. If one of them cannot be decoded, the installation is broken."""

from __future__ import annotations

import io
import struct
from importlib import resources

from triptych.messages import MediaForm, MediaKind

EXAMPLE_FILES: dict[MediaKind, str] = {
    "image": "circles.png",
    "video": "motion.mp4",
    "audio": "seven.wav",
}
CANARY_FILES: dict[MediaKind, str] = {"image": "image.png", "audio": "audio.wav"}
_EMBEDDING = b'{"x":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}'


def example_file(kind: MediaKind) -> bytes:
    """The example of that kind that ships with the package."""
    return _asset("examples", EXAMPLE_FILES[kind])


def canary_file(kind: MediaKind) -> bytes:
    """A file that fits into a short context: 56 x 56 pixels, half a second of sound."""
    small = CANARY_FILES.get(kind)
    return example_file(kind) if small is None else _asset("canary", small)


def sample_files(kind: MediaKind, form: MediaForm) -> list[bytes]:
    """Good files of a kind; of images, one in each format."""
    if form == "embeds":
        return [struct.pack("<Q", len(_EMBEDDING)) + _EMBEDDING + bytes(4)]
    if kind == "image":
        return [example_file(kind), _image_file("JPEG"), _image_file("WEBP")]
    return [example_file(kind)]


def _asset(folder: str, name: str) -> bytes:
    return resources.files("triptych").joinpath("assets", folder, name).read_bytes()


def _image_file(format: str) -> bytes:
    from PIL import Image

    file = io.BytesIO()
    Image.new("RGB", (64, 64), (200, 30, 30)).save(file, format)
    return file.getvalue()
