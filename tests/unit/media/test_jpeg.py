from __future__ import annotations

import pytest
from PIL import Image

from support.pictures import draw, encoded, with_few_blocks, with_scans
from triptych.errors import InvalidMedia
from triptych.media import image_file, jpeg

LIMIT = 64_000_000


def test_b44_thousands_of_scans_are_counted_and_not_decoded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def load(image: Image.Image) -> None:
        raise AssertionError("it is decoded")

    bomb = with_scans(3000)
    monkeypatch.setattr("PIL.ImageFile.ImageFile.load", load)
    with pytest.raises(InvalidMedia, match="more than 100 scans"):
        image_file.decode_image(bomb, LIMIT)


def test_b44_as_many_scans_as_are_allowed() -> None:
    assert image_file.decode_image(with_scans(jpeg.MAX_SCANS, 64), LIMIT).size == (64, 64)
    with pytest.raises(InvalidMedia, match="scans"):
        image_file.decode_image(with_scans(jpeg.MAX_SCANS + 1, 64), LIMIT)


def test_b44_scans_in_a_thumbnail_do_not_count() -> None:
    data = encoded(draw(1, 32, 32), "JPEG", progressive=True)
    comment = b"\xff\xda" * 30_000
    data = data[:2] + b"\xff\xfe" + (len(comment) + 2).to_bytes(2) + comment + data[2:]
    jpeg.check_jpeg(data)


def test_b44_segments_without_end() -> None:
    data = encoded(draw(1, 32, 32), "JPEG")
    with pytest.raises(InvalidMedia, match="segments"):
        jpeg.check_jpeg(data[:2] + b"\xff\xfe\0\2" * (jpeg.MAX_SEGMENTS + 1) + data[2:])


@pytest.mark.parametrize("progressive", [False, True])
def test_b44_data_that_end_after_a_few_blocks(progressive: bool) -> None:
    with pytest.raises(InvalidMedia, match="cut short"):
        image_file.decode_image(with_few_blocks(progressive=progressive), LIMIT)


@pytest.mark.parametrize("kept", [0.1, 0.5, 0.9])
@pytest.mark.parametrize("subsampling", [0, 2])
def test_b44_data_that_end_midway_give_no_grey_picture(kept: float, subsampling: int) -> None:
    data = encoded(draw(1, 200, 120), "JPEG", subsampling=subsampling)
    start = data.index(b"\xff\xda") + 14
    cut = data[: start + int(kept * (len(data) - start))].rstrip(b"\xff") + b"\xff\xd9"
    with pytest.raises(InvalidMedia, match="cut short"):
        image_file.decode_image(cut, LIMIT)


@pytest.mark.parametrize("mode", ["L", "RGB", "CMYK"])
@pytest.mark.parametrize("size", [(1, 1), (7, 200), (641, 479)])
@pytest.mark.parametrize("index", range(4))
def test_whole_files_are_accepted(mode: str, size: tuple[int, int], index: int) -> None:
    image = draw(index, *size).convert(mode)
    flat = Image.new(mode, size)
    for picture in (image, flat):
        for how in (
            {"quality": 1},
            {"optimize": True, "quality": 50, "subsampling": 0},
            {"progressive": True},
            {"restart_marker_blocks": 1},
        ):
            assert image_file.decode_image(encoded(picture, "JPEG", **how), LIMIT).size == size
