import struct

import pytest

from support import clips
from triptych.media import container


def view(*parts):
    return memoryview(b"".join(parts))


def box(kind, body=b"", size=None):
    return struct.pack(">I", 8 + len(body) if size is None else size) + kind + body


@pytest.mark.parametrize(
    ("form", "name"), [("mp4", "mov"), ("mjpeg", "mov"), ("mkv", "matroska"), ("webm", "matroska")]
)
def test_a_file_is_whole_until_it_is_cut(form, name):
    data = memoryview(clips.video(1, form, frames=10, sound=0.5 if form == "webm" else 0.0))
    assert container.is_complete_file(data, name)
    assert not container.is_complete_file(data[:-1], name)
    assert not container.is_complete_file(data[: len(data) // 2], name)


def test_wav():
    data = memoryview(clips.sound(1, "wav"))
    assert container.is_complete_file(data, "wav")
    assert not container.is_complete_file(data[:-2], "wav")
    assert container.wav_rate(data) == 48000


def test_wav_of_unknown_length_is_whole():
    data = bytearray(clips.sound(1, "wav"))
    at = data.index(b"data") + 4
    data[at : at + 4] = b"\xff" * 4
    assert container.is_complete_file(memoryview(data), "wav")


def test_boxes():
    large = struct.pack(">I4sQ", 1, b"mdat", 20) + bytes(4)
    data = view(box(b"ftyp", b"isom"), large, box(b"moov", size=0), b"rest")
    assert [*container.mp4_boxes(data)] == [(b"ftyp", 8, 12), (b"mdat", 28, 32), (b"moov", 40, 44)]


@pytest.mark.parametrize("size", [2, 7])
def test_a_box_that_is_too_small_ends_the_reading(size):
    assert len([*container.mp4_boxes(view(box(b"free", size=size), bytes(100)))]) == 1


def test_what_follows_the_boxes_does_not_matter():
    assert container.is_complete_file(
        view(box(b"ftyp"), box(b"mdat", b"abc"), b"\x7fzzzzzzz"), "mov"
    )


def test_movie_seconds():
    assert container.movie_seconds(memoryview(clips.video(1, frames=50))) == pytest.approx(2.0)
    wide = struct.pack(">B3xQQIQ", 1, 0, 0, 1000, 5_000_000)
    assert container.movie_seconds(view(box(b"moov", box(b"mvhd", wide)))) == 5000.0
    unknown = struct.pack(">B3xIIII", 0, 0, 0, 1000, 2**32 - 1)
    assert container.movie_seconds(view(box(b"moov", box(b"mvhd", unknown)))) == 0.0
    assert container.movie_seconds(view(box(b"moov", box(b"mvhd")))) == 0.0
    assert container.movie_seconds(view(b"")) == 0.0


@pytest.mark.parametrize("name", ["mov", "matroska", "wav", "flac", "mp3", "ogg"])
@pytest.mark.parametrize("form", ["mp4", "mkv"])
def test_no_beginning_of_a_file_is_too_short_to_be_read(name, form):
    data = clips.video(1, form, frames=2)
    for size in range(200):
        container.is_complete_file(memoryview(data)[:size], name)
        container.movie_seconds(memoryview(data)[:size])
        container.wav_rate(memoryview(data)[:size])
        container.counts_samples(memoryview(b"ID3" + data)[:size], name)
