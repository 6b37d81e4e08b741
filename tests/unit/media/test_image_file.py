from __future__ import annotations

import io
import struct
import zlib

import numpy as np
import pytest
from PIL import Image, ImageOps

from support.pictures import draw, encoded
from triptych.errors import ImageTooLarge, InvalidMedia, UnsupportedMediaType
from triptych.media import image_file

LIMIT = 1_000_000


def decode(data: bytes) -> np.ndarray:
    return np.asarray(image_file.decode_image(data, LIMIT))


@pytest.mark.parametrize("form", ["PNG", "WEBP"])
def test_lossless_formats(form: str) -> None:
    picture = draw(1, 31, 17)
    got = decode(encoded(picture, form, **({"lossless": True} if form == "WEBP" else {})))
    assert got.shape == (17, 31, 3)
    assert got.dtype == np.uint8
    assert np.array_equal(got, np.asarray(picture))


def test_a_jpeg_as_pillow_reads_it() -> None:
    data = encoded(draw(3), "JPEG")
    assert np.array_equal(decode(data), np.asarray(Image.open(_file(data)).convert("RGB")))
    assert np.array_equal(decode(memoryview(data)), decode(data))


@pytest.mark.parametrize("orientation", range(1, 9))
def test_exif_rotation(orientation: int) -> None:
    exif = Image.Exif()
    exif[0x0112] = orientation
    data = encoded(draw(2, 30, 20), "JPEG", exif=exif)
    expected = ImageOps.exif_transpose(Image.open(_file(data)))
    assert np.array_equal(decode(data), np.asarray(expected))
    assert (decode(data).shape == (30, 20, 3)) == (orientation >= 5)


def test_palette_and_its_colours_count() -> None:
    indices = Image.fromarray(np.arange(64, dtype=np.uint8).reshape(8, 8)).convert("P")
    red, blue = indices.copy(), indices.copy()
    red.putpalette([value for i in range(256) for value in (i, 0, 0)])
    blue.putpalette([value for i in range(256) for value in (0, 0, i)])
    first, second = decode(encoded(red)), decode(encoded(blue))
    assert first[0, 7].tolist() == [7, 0, 0]
    assert second[0, 7].tolist() == [0, 0, 7]


def test_transparency_is_laid_on_white() -> None:
    pixels = np.zeros((2, 2, 4), np.uint8)
    pixels[0, 0] = (10, 20, 30, 255)
    pixels[0, 1] = (10, 20, 30, 0)
    pixels[1] = (0, 0, 0, 128)
    got = decode(encoded(Image.fromarray(pixels)))
    assert got[0].tolist() == [[10, 20, 30], [255, 255, 255]]
    assert got[1, 0].tolist() == [127, 127, 127]


@pytest.mark.parametrize("transparency", [5, bytes([255] * 5 + [0])])
def test_a_transparent_palette_colour(transparency: int | bytes) -> None:
    image = Image.fromarray(np.full((4, 4), 5, np.uint8)).convert("P")
    image.putpalette([9] * 768)
    assert decode(encoded(image, transparency=transparency)).tolist() == [[[255] * 3] * 4] * 4


def test_a_transparent_grey() -> None:
    image = Image.fromarray(np.array([[5, 6]], np.uint8))
    assert decode(encoded(image, transparency=5)).tolist() == [[[255] * 3, [6] * 3]]


def test_cmyk() -> None:
    data = encoded(draw(0, 16, 16).convert("CMYK"), "JPEG")
    assert np.array_equal(decode(data), np.asarray(Image.open(_file(data)).convert("RGB")))


def test_16_bit_grey_keeps_its_tones() -> None:
    wide = np.array([[0, 255, 256, 0x8000, 0xFFFF]], np.uint16)
    assert decode(encoded(Image.fromarray(wide)))[0, :, 0].tolist() == [0, 0, 1, 128, 255]


@pytest.mark.parametrize("mode", ["1", "L", "LA"])
def test_grey(mode: str) -> None:
    image = draw(1, 9, 9).convert(mode)
    assert np.array_equal(decode(encoded(image)), np.asarray(image.convert("RGB")))


def test_of_an_animation_the_first_frame() -> None:
    frames = [draw(0, 8, 8), draw(4, 8, 8)]
    data = encoded(frames[0], "PNG", save_all=True, append_images=frames[1:])
    assert np.array_equal(decode(data), np.asarray(frames[0]))


@pytest.mark.parametrize("form", ["JPEG", "PNG", "WEBP"])
@pytest.mark.parametrize("kept", [0.02, 0.5, 0.9])
def test_b26_truncated(form: str, kept: float) -> None:
    data = encoded(draw(1, 64, 64), form)
    with pytest.raises(InvalidMedia):
        decode(data[: int(len(data) * kept)])


@pytest.mark.parametrize(
    "data", [b"", b"<html></html>", b"\x89PNG\r\n\x1a\n", b"RIFF____WEBP", b"\0" * 99]
)
def test_b26_no_image(data: bytes) -> None:
    with pytest.raises(InvalidMedia):
        decode(data)


@pytest.mark.parametrize("form", ["GIF", "BMP", "TIFF", "JPEG2000", "EPS", "ICO", "AVIF"])
def test_b29_other_formats(form: str) -> None:
    Image.init()
    if form not in Image.SAVE:
        pytest.skip(f"this Pillow writes no {form}")
    with pytest.raises(UnsupportedMediaType, match="JPEG, PNG or WebP"):
        decode(encoded(draw(0, 32, 32), form))


def test_b29_psd() -> None:
    with pytest.raises(UnsupportedMediaType, match="PSD"):
        decode(b"8BPS" + b"\0" * 64)


def test_b27_the_size_is_checked_before_any_raster_is_allocated() -> None:
    with pytest.raises(ImageTooLarge, match="50000 x 50000"):
        decode(_png_head(50_000, 50_000))  # it has no pixels at all


@pytest.mark.parametrize("lossless", [True, False])
def test_b27_webp(lossless: bool) -> None:
    with pytest.raises(ImageTooLarge, match="2000 x 501"):
        decode(encoded(draw(0, 2000, 501), "WEBP", lossless=lossless)[:40])


def test_b27_webp_with_a_canvas() -> None:
    image = Image.new("RGBA", (2000, 501))
    with pytest.raises(ImageTooLarge, match="2000 x 501"):
        decode(encoded(image, "WEBP", save_all=True, append_images=[draw(1, 2000, 501)])[:40])


def test_the_limit_itself_is_accepted() -> None:
    assert decode(encoded(draw(0, 1000, 1000))).shape == (1000, 1000, 3)
    with pytest.raises(ImageTooLarge):
        decode(encoded(draw(0, 1000, 1001)))


def _file(data: bytes) -> io.BytesIO:
    return io.BytesIO(data)


def _chunk(kind: bytes, body: bytes) -> bytes:
    check = zlib.crc32(kind + body)
    return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", check)


def _png_head(width: int, height: int) -> bytes:
    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + _chunk(b"IHDR", head) + _chunk(b"IDAT", b"")


TEXTS = {  # under names at which Pillow keeps what it has parsed itself
    "tEXt xmp": (b"tEXt", b"xmp\0words"),
    "tEXt transparency": (b"tEXt", b"transparency\0words"),
    "zTXt exif": (b"zTXt", b"exif\0\0" + zlib.compress(b"words")),
    "iTXt exif": (b"iTXt", b"exif\0\0\0\0\0words"),
}


@pytest.mark.parametrize("mode", ["RGB", "L", "P"])
@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("last", [False, True], ids=["before", "after"])
def test_texts_in_a_png_are_not_read_as_its_metadata(text: str, mode: str, last: bool) -> None:
    data = encoded(draw(1, 9, 9).convert(mode))
    place = data.rindex(b"IEND") - 4 if last else data.index(b"IDAT") - 4
    chunk = _chunk(*TEXTS[text])
    assert decode(data[:place] + chunk + data[place:]).tobytes() == decode(data).tobytes()


@pytest.mark.parametrize("error", [TypeError, AttributeError, ImportError])
@pytest.mark.parametrize("where", ["open", "load"])
def test_a_pillow_that_does_not_fit_is_not_the_files_fault(
    monkeypatch: pytest.MonkeyPatch, error: type[Exception], where: str
) -> None:
    def mismatch(*words: object, **named: object) -> None:
        raise error

    place = "PIL.Image.open" if where == "open" else "PIL.ImageFile.ImageFile.load"
    data = encoded(draw(1, 9, 9))
    monkeypatch.setattr(place, mismatch)
    with pytest.raises(error):
        decode(data)
