"""Picture files to RGB pixels.

The content decides whether a file is JPEG, PNG or WebP, never a name. Pixels equal those of
transformers: `load_image` and `convert_to_rgb`. They are rotated by EXIF, with transparency on
white; Pillow converts palette, grey and CMYK; colour profiles are ignored; an animation gives its
first frame. One thing differs: 16-bit grey keeps its high byte, where Pillow would clip to white.
Does not know models.
"""

from __future__ import annotations

import io
import struct
import warnings
import zlib

import numpy as np
from PIL import Image, UnidentifiedImageError

from triptych.errors import ImageTooLarge, InvalidMedia, UnsupportedMediaType
from triptych.media import jpeg

# Our own limit applies before a raster is allocated; Pillow's would first warn, then refuse.
Image.MAX_IMAGE_PIXELS = None

IMAGE_FORMATS = ("JPEG", "PNG", "WEBP")

_ORIENTATION = 0x0112
_ROTATIONS = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
_INFO_TYPES: dict[str, tuple[type, ...]] = {
    "transparency": (int, bytes, tuple),
    "exif": (bytes,),
    "xmp": (bytes,),
}
_OTHER_FORMATS = (
    (0, b"GIF8", "GIF"),
    (0, b"BM", "BMP"),
    (0, b"II*\0", "TIFF"),
    (0, b"MM\0*", "TIFF"),
    (0, b"8BPS", "PSD"),
    (0, b"%!PS", "EPS"),
    (0, b"\xc5\xd0\xd3\xc6", "EPS"),
    (0, b"\0\0\0\x0cjP  ", "JPEG 2000"),
    (0, b"\xff\x4f\xff\x51", "JPEG 2000"),
    (0, b"\xff\x0a", "JPEG XL"),
    (0, b"\0\0\0\x0cJXL ", "JPEG XL"),
    (0, b"\0\0\1\0", "ICO"),
    (0, b"qoif", "QOI"),
    (0, b"%PDF", "PDF"),
    (0, b"<svg", "SVG"),
    (4, b"ftypavi", "AVIF"),
    (4, b"ftyphei", "HEIC"),
    (4, b"ftypmif1", "HEIF"),
)

# What Pillow's decoders raise for damaged files. Their messages can hold addresses of objects, so
# clients do not get them. The sandbox judges any other error: Pillow's version may not fit.
_DAMAGED = "The image is damaged or cut short."
_DAMAGE = (
    OSError,
    SyntaxError,
    ValueError,
    IndexError,
    KeyError,
    OverflowError,
    EOFError,
    struct.error,
    zlib.error,
)


def decode_image(data: bytes | memoryview, max_pixels: int) -> Image.Image:
    """The file's picture, in mode RGB."""
    if not len(data):
        raise InvalidMedia("The image is empty.")
    _check_size(_webp_size(bytes(data[:32])), max_pixels)
    with warnings.catch_warnings(action="ignore"):  # about metadata
        return _decode(data, max_pixels)


def _decode(data: bytes | memoryview, max_pixels: int) -> Image.Image:
    try:
        image = Image.open(io.BytesIO(data), formats=IMAGE_FORMATS)
    except UnidentifiedImageError:
        raise _unknown(bytes(data[:32])) from None
    except _DAMAGE as error:
        raise InvalidMedia(_DAMAGED) from error
    _check_size(image.size, max_pixels)
    jpeg.check_jpeg(data)
    try:
        image.load()
        _drop_false_info(image)
        if image.format in ("JPEG", "MPO") and _ends_flat(image):
            _check_end(data)
        return _rgb(_rotated(image))
    except _DAMAGE as error:
        if "out of memory" in str(error):  # Pillow's decoders raise no MemoryError
            raise MemoryError from None
        raise InvalidMedia(_DAMAGED) from error


def _ends_flat(image: Image.Image) -> bool:
    """Whether the last block has one colour, as it does if a JPEG's data ended before it."""
    width, height = image.size
    last = image.crop(((width - 1) // 8 * 8, (height - 1) // 8 * 8, width, height))
    return last.getcolors(1) is not None


def _check_end(data: bytes | memoryview) -> None:
    """Check that a JPEG's data are complete. Decoding an eighth of each side is enough."""
    other = jpeg.pad_jpeg(data)
    if other is not None and _eighth(data) != _eighth(other):
        raise InvalidMedia(_DAMAGED)


def _eighth(data: bytes | memoryview) -> bytes:
    with Image.open(io.BytesIO(data), formats=("JPEG",)) as image:
        image.draft("L", (max(1, image.width // 8), max(1, image.height // 8)))
        return image.tobytes()


def _drop_false_info(image: Image.Image) -> None:
    """Text chunks of a PNG can have the names under which Pillow stores what it has parsed."""
    for name, types in _INFO_TYPES.items():
        if not isinstance(image.info.get(name), types):
            image.info.pop(name, None)


def _rotated(image: Image.Image) -> Image.Image:
    """Rotated by EXIF. Pillow's own function writes all tags again, and fails on bad ones."""
    try:
        method = _ROTATIONS.get(image.getexif().get(_ORIENTATION, 1))
    except (*_DAMAGE, TypeError, AttributeError):  # unreadable metadata
        return image
    return image if method is None else image.transpose(method)


def _check_size(size: tuple[int, int], max_pixels: int) -> None:
    width, height = size
    if width * height > max_pixels:
        raise ImageTooLarge(
            f"The image is {width} x {height}, but at most {max_pixels} pixels are taken. "
            "Send a smaller one."
        )


def _webp_size(head: bytes) -> tuple[int, int]:
    """The size of a WebP, whose decoder allocates before it reports one; (0, 0) of any other."""
    if head[:4] != b"RIFF" or head[8:12] != b"WEBP" or len(head) < 30:
        return 0, 0
    if head[12:16] == b"VP8X":
        width, height = int.from_bytes(head[24:27], "little"), int.from_bytes(head[27:30], "little")
        return width + 1, height + 1
    if head[12:16] == b"VP8L":
        bits = int.from_bytes(head[21:25], "little")
        return (bits & 0x3FFF) + 1, (bits >> 14 & 0x3FFF) + 1
    width, height = struct.unpack_from("<HH", head, 26)
    return width & 0x3FFF, height & 0x3FFF


def _unknown(head: bytes) -> InvalidMedia | UnsupportedMediaType:
    for offset, mark, name in _OTHER_FORMATS:
        if head.startswith(mark, offset):
            return UnsupportedMediaType(f"{name} images are not taken. Send JPEG, PNG or WebP.")
    return InvalidMedia("The data is not an image. Send JPEG, PNG or WebP.")


def _rgb(image: Image.Image) -> Image.Image:
    if image.mode.startswith("I;16"):
        return _grey16(image)
    if "A" in image.getbands() or image.info.get("transparency") is not None:
        layer = image.convert("RGBA")
        white = Image.new("RGBA", layer.size, (255, 255, 255, 255))
        return Image.alpha_composite(white, layer).convert("RGB")
    return image if image.mode == "RGB" else image.convert("RGB")  # convert always copies


def _grey16(image: Image.Image) -> Image.Image:
    wide = np.asarray(image)
    grey = (wide >> 8).astype(np.uint8)
    if (clear := image.info.get("transparency")) is not None:
        grey[wide == clear] = 255
    return Image.fromarray(grey).convert("RGB")
