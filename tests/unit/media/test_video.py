import io
import struct
from fractions import Fraction

import av
import numpy as np
import pytest

from support import clips
from triptych.config import Config, Limits
from triptych.errors import (
    AudioTooLong,
    ImageTooLarge,
    InvalidMedia,
    MediaError,
    TooManyFrames,
    UnsupportedMediaType,
)
from triptych.media import audio, container, video
from triptych.media.container import VIDEO_CONTAINERS, open_container
from triptych.media.pool import DecodePool
from triptych.messages import MediaItem
from triptych.recipe import (
    FrameSampling,
    GridVideo,
    MelAudio,
    Normalization,
    Recipes,
    SquareImage,
    SquareVideo,
)

TONE = Normalization(1 / 255, (0.5, 0.5, 0.5), (0.5, 0.5, 0.5))
MEL = MelAudio(16000, 400, 160, 80, 3000)
STAMPS = np.cumsum(np.random.default_rng(7).integers(10, 200, 60)).tolist()
X264 = "x264-params"
CLIPS = {
    "b-frames": {"bframes": 3, "gop": 30},
    "one long group": {"bframes": 5, "gop": 250, X264: "b-pyramid=normal:b-adapt=0:scenecut=0"},
    "open groups": {"form": "mkv", "bframes": 3, "gop": 10, X264: "open-gop=1:scenecut=0"},
    "intra refresh": {"gop": 20, "preset": "veryfast", X264: "intra-refresh=1:scenecut=0"},
    "odd time base": {"fps": Fraction(30000, 1001), "bframes": 2},
    "variable rate": {"frames": 60, "stamps": STAMPS, "bframes": 2},
    "variable rate, mkv": {"form": "mkv", "frames": 60, "stamps": STAMPS, "bframes": 2},
    "vp8": {"form": "webm"},
    "vp9": {"form": "vp9", "gop": 40, "auto-alt-ref": "1", "lag-in-frames": "16"},
    "hevc": {"form": "hevc", "bframes": 3, "gop": 20},
    "av1": {"form": "av1", "gop": 16},
    "mpeg4": {"form": "mpeg4", "bframes": 2},
    "mjpeg": {"form": "mjpeg"},
    "sound too": {"sound": 1.0, "bframes": 2},
}


def even(count=0, patch=2):
    return FrameSampling("even", 2.0, count, 4, 768, patch)


def grid(rule=None, *, per_frame=True, sound=False):
    return GridVideo(rule or even(), 14, 2, 28 * 28, 28 * 28 * 24, per_frame, 3, TONE, sound)


def square(rule, side=28, short=28):
    return SquareVideo(rule, SquareImage(short, side, 14, 0, 3, TONE), 3)


def prepare(data, recipe=None, sound=None, **limits):
    recipe = recipe or grid()
    return video.prepare_video(memoryview(data), recipe, Recipes("", audio=sound), Limits(**limits))


def shown(data):
    """All frames, as transformers reads them with PyAV."""
    with av.open(io.BytesIO(data)) as container:
        return [frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)]


def remuxed(data, form, **options):
    file = io.BytesIO()
    with (
        av.open(io.BytesIO(data)) as source,
        av.open(file, "w", format=form, options=options) as out,
    ):
        track = source.streams.video[0]
        copy = out.add_stream_from_template(track)
        for packet in source.demux(track):
            if packet.dts is not None:
                packet.stream = copy
                out.mux(packet)
    return file.getvalue()


def forged(data, box, at, form, value):
    """An MP4 with another number in its first box of a kind."""
    place = data.index(box) + 4 + at
    return data[:place] + struct.pack(form, value) + data[place + struct.calcsize(form) :]


# Which frames


@pytest.mark.parametrize("name", CLIPS)
def test_seeking_gives_what_decoding_everything_gives(name, monkeypatch):
    data = clips.video(3, **CLIPS[name])
    if name != "intra refresh":  # whose key frames are none
        monkeypatch.setattr(video, "count_frames", None)  # all others are never decoded whole
    all_frames = shown(data)
    rng = np.random.default_rng(1)
    sets = [[0], [len(all_frames) - 1], [*range(len(all_frames))], [5, 6, 30]]
    sets += [sorted(rng.choice(len(all_frames), count, False).tolist()) for count in (1, 2, 4, 8)]
    sets += [[index] for index in range(1, len(all_frames), 7)]
    for wanted in sets:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(video, "choose_frames", lambda *_, wanted=wanted: wanted)
            taken = video.sample_frames(memoryview(data), even(patch=1), whole, 3, Limits())
        assert taken.total == len(all_frames)
        for index, pixels in zip(wanted, taken.pixels, strict=True):
            assert np.array_equal(pixels, all_frames[index]), (wanted, index)


def whole(count, height, width):
    return video.FrameCrop(height, width, height, width)


@pytest.mark.parametrize("form", ["mp4", "webm", "mkv", "hevc"])
def test_the_frames_are_those_of_their_numbers(form):
    _, (pixels,), _ = prepare(clips.video(2, form), grid(even(8)))
    assert [clips.frame_of(frame, 2) for frame in pixels] == [0, 6, 12, 18, 25, 31, 37, 43]


def test_false_key_frames_are_detected():
    """A track without its table of key frames claims that all are."""
    data = clips.video(3, "hevc", bframes=2).replace(b"stss", b"free")
    _, (pixels,), _ = prepare(data, grid(even(4)))
    assert [clips.frame_of(frame, 3) for frame in pixels] == [0, 12, 25, 37]


def test_an_edit_list_hides_frames(monkeypatch):
    """What is cut off at the front by the container counts as little as in transformers."""
    data = clips.video(1, frames=40, gop=20)
    place = data.index(b"elst") + 4
    start = struct.unpack(">i", data[place + 12 : place + 16])[0]
    cut = forged(data, b"elst", 12, ">i", start + 10 * 512)
    numbers = [clips.frame_of(frame, 1) for frame in shown(cut)]
    assert numbers[0] == 10
    monkeypatch.setattr(video, "count_frames", None)
    _, (pixels,), _ = prepare(cut, grid(even(0, patch=1)))
    assert [clips.frame_of(frame, 1) for frame in pixels] == numbers


# Shape, meta and sound


def test_grid_meta():
    meta, (pixels,), cost = prepare(clips.video(1, frames=50), grid(even(5)))
    assert pixels.dtype == np.uint8
    assert pixels.shape == (6, 56, 84, 3)
    assert np.array_equal(pixels[4], pixels[5])
    assert (meta.kind, meta.key, meta.grid, meta.audio_tokens) == ("video", b"", (3, 4, 6), 0)
    assert meta.tokens == 3 * 4 * 6 // 4
    assert cost == 3 * 4 * 6
    assert len(meta.times) == 3


def test_limits_of_pixels_are_for_one_frame_or_for_all():
    data = clips.video(1, frames=12, width=280, height=280)
    _, (alone,), _ = prepare(data, grid(even(12)))
    _, (shared,), _ = prepare(data, grid(even(12), per_frame=False))
    assert alone.shape == (12, 112, 112, 3)
    assert shared.shape == (12, 28, 28, 3)


@pytest.mark.parametrize("form", ["mp4", "webm"])
def test_rate_of_the_clip_and_times(form):
    data = clips.video(1, form, frames=75)  # three seconds
    meta, (pixels,), _ = prepare(data, grid(FrameSampling("qwen2", 2.0, 0, 4, 768, 2)))
    assert len(pixels) == 6
    assert meta.times == (0.0, 1.0, 2.0)
    meta, (pixels,), _ = prepare(
        data, grid(FrameSampling("qwen3", 2.0, 0, 4, 768, 2), per_frame=False)
    )
    taken = [clips.frame_of(frame, 1) for frame in pixels]
    assert taken == [0, 15, 30, 44, 59, 74]
    assert meta.times == pytest.approx((7.5 / 25, 37 / 25, 66.5 / 25))


def test_square_video():
    meta, (pixels,), cost = prepare(clips.video(1, frames=20), square(even(5, patch=1)))
    assert pixels.shape == (5, 28, 28, 3)
    assert (meta.grid, meta.tokens) == ((5,), 15)
    assert cost == 5 * 4
    assert [clips.frame_of(frame, 1) for frame in pixels] == [0, 4, 8, 12, 16]


def test_a_single_frame():
    for rule in (
        FrameSampling("qwen2", 2.0, 0, 4, 768, 2),
        FrameSampling("qwen3", 2.0, 0, 4, 768, 2),
    ):
        meta, (pixels,), _ = prepare(clips.video(1, frames=1), grid(rule))
        assert meta.grid[0] == 1
        assert len(pixels) == 2
        assert len(meta.times) == 1


@pytest.mark.parametrize("form", ["mp4", "webm"])
def test_sound_of_the_clip(form):
    data = clips.video(1, form, frames=50, sound=2.0)
    meta, (pixels, spectrum), cost = prepare(data, grid(even(4), sound=True), MEL)
    assert meta.audio_tokens == pytest.approx(50, abs=1)
    assert meta.tokens == 2 * 4 * 6 // 4 + meta.audio_tokens
    assert cost == 2 * 4 * 6 + spectrum.shape[1]
    assert np.array_equal(spectrum, audio.prepare_audio(memoryview(data), MEL, Limits())[1][0])
    assert pixels.shape == (4, 56, 84, 3)


def test_sound_only_where_it_is_wanted_and_there():
    loud, still = clips.video(1, frames=4, sound=1.0), clips.video(1, frames=4)
    for data, recipe, sound in (
        (loud, grid(), MEL),
        (loud, grid(sound=True), None),
        (still, grid(sound=True), MEL),
    ):
        meta, arrays, _ = prepare(data, recipe, sound)
        assert meta.audio_tokens == 0
        assert len(arrays) == 1


def test_b33_sound_of_a_clip_over_the_limit():
    data = clips.video(1, frames=4, sound=2.0)
    with pytest.raises(AudioTooLong):
        prepare(data, grid(sound=True), MEL, audio_seconds=1.0)


def test_same_number_same_clip_and_no_other():
    one, again, two = (prepare(clips.video(n))[1][0] for n in (1, 1, 2))
    assert np.array_equal(one, again)
    assert not np.array_equal(one, two)


# What is refused


@pytest.fixture
def _undecoded(monkeypatch):
    """Nothing may be decoded in this test."""
    monkeypatch.setattr(video, "seek_frames", None)
    monkeypatch.setattr(video, "scan_frames", None)


@pytest.mark.usefixtures("_undecoded")
@pytest.mark.parametrize("form", ["mp4", "webm"])
def test_b31_too_many_frames(form):
    with pytest.raises(TooManyFrames, match="more than 49 frames"):
        prepare(clips.video(1, form, frames=50), video_frames=49)


def test_b31_as_many_frames_as_are_allowed():
    assert prepare(clips.video(1, frames=50), video_frames=50)


@pytest.mark.usefixtures("_undecoded")
def test_b31_ten_thousand_frames():
    data = clips.video(1, "mpeg4", frames=10_000, width=16, height=16)
    with pytest.raises(TooManyFrames):
        prepare(data)


@pytest.mark.usefixtures("_undecoded")
def test_b31_too_many_frames_to_look_at():
    with pytest.raises(TooManyFrames, match=r"50 frames .* 49 is the most"):
        prepare(clips.video(1, frames=50), video_sampled=49)


@pytest.mark.usefixtures("_undecoded")
def test_b27_frames_too_large():
    with pytest.raises(ImageTooLarge, match="96 x 64"):
        prepare(clips.video(1), image_pixels=96 * 64 - 1)


def test_b27_frames_larger_than_the_first(monkeypatch):
    small, large = (
        clips.video(1, "mjpeg", frames=3, width=side, height=side) for side in (32, 512)
    )
    file = io.BytesIO()
    with (
        av.open(io.BytesIO(small)) as head,
        av.open(io.BytesIO(large)) as body,
        av.open(file, "w", format="mov") as out,
    ):
        track = out.add_stream_from_template(head.streams.video[0])
        packets = [next(head.demux(video=0)), *list(body.demux(video=0))[1:3]]
        for packet in packets:
            packet.stream = track
            out.mux(packet)
    data = file.getvalue()
    monkeypatch.setattr(video, "choose_frames", lambda *_: [2])
    assert prepare(data)
    with pytest.raises(MediaError):
        prepare(data, image_pixels=64 * 64)


def test_frames_too_long_for_their_width():
    data = clips.video(1, frames=2, width=4096, height=16)
    for recipe in (grid(), square(even(2, patch=1))):
        with pytest.raises(MediaError, match="4096 x 16"):
            prepare(data, recipe)


@pytest.mark.parametrize("codec", ["ffv1", "prores"])
def test_b32_a_forbidden_codec_is_never_opened(codec):
    file = io.BytesIO()
    with av.open(file, "w", format="matroska") as out:
        track = out.add_stream(codec, rate=25)
        track.width, track.height = 64, 64
        track.pix_fmt = "yuv422p10le" if codec == "prores" else "yuv422p"
        picture = av.VideoFrame.from_ndarray(clips.draw(1, 0, 64, 64), "rgb24")
        out.mux(track.encode(picture))
        out.mux(track.encode(None))
    data = file.getvalue()
    with av.open(io.BytesIO(data)) as container:
        assert container.streams.video[0].pix_fmt  # known by decoding a frame
    with open_container(memoryview(data), "video", VIDEO_CONTAINERS, Limits()) as container:
        assert container.streams.video[0].pix_fmt is None
    with pytest.raises(InvalidMedia, match=codec):
        prepare(data)


@pytest.mark.usefixtures("_undecoded")
def test_b32_forged_duration_mp4():
    data = clips.video(1, sound=1.0)
    with pytest.raises(InvalidMedia, match="lasts"):
        prepare(forged(data, b"mvhd", 16, ">I", 2**31))


@pytest.mark.usefixtures("_undecoded")
def test_b32_forged_duration_mkv():
    data = clips.video(1, "mkv")
    place = data.index(b"\x44\x89\x88") + 3
    with pytest.raises(InvalidMedia, match="lasts"):
        prepare(data[:place] + struct.pack(">d", 1e9) + data[place + 8 :])


@pytest.mark.parametrize(
    ("box", "at", "value"),
    [
        (b"tkhd", 20, 2**31),
        (b"mdhd", 16, 2**31),
        (b"mdhd", 16, 1),
        (b"mvhd", 16, 1),
        (b"stts", 8, 5_000_000),
    ],
)
def test_b32_other_forged_numbers_decide_nothing(box, at, value):
    data = clips.video(1)
    honest, lying = prepare(data), prepare(forged(data, box, at, ">I", value))
    assert honest[0] == lying[0]
    assert np.array_equal(honest[1][0], lying[1][0])


@pytest.mark.usefixtures("_undecoded")
def test_b32_forged_times():
    """Fifty frames within no time, or within years."""
    data = clips.video(1, "mkv", frames=50, stamps=[*range(0, 50 * 2_000_000, 2_000_000)])
    with pytest.raises(InvalidMedia, match="50 frames"):
        prepare(data)
    with pytest.raises(InvalidMedia):
        prepare(forged(clips.video(1), b"mdhd", 12, ">I", 2**31 - 1))


@pytest.mark.parametrize("form", ["mp4", "mkv", "webm"])
@pytest.mark.parametrize("share", [0.1, 0.5, 0.95])
def test_b26_cut_short(form, share):
    data = clips.video(1, form)
    if form == "mp4":
        if container.PYAV < 15:
            pytest.skip("PyAV 14 writes no such file that can be read")
        data = remuxed(data, "mp4", movflags="frag_keyframe+empty_moov")
    assert prepare(data)
    with pytest.raises(InvalidMedia):
        prepare(data[: int(len(data) * share)])


@pytest.mark.parametrize(
    "data", [b"", b"\x1a\x45\xdf\xa3", b"\0\0\0\x14ftypisom", b"<html>not found</html>", bytes(99)]
)
def test_b26_no_video_at_all(data):
    with pytest.raises(InvalidMedia):
        prepare(data)


def test_b26_sound_alone_is_not_a_video():
    with pytest.raises(InvalidMedia, match="no video"):
        prepare(clips.sound(1, "m4a"))


@pytest.mark.parametrize(
    ("head", "name"),
    [(b"RIFF\0\0\0\0AVI LIST", "AVI"), (b"FLV\x01", "FLV"), (b"OggS", "ogg"), (b"fLaC", "flac")],
)
def test_b29_other_forms_are_named(head, name):
    with pytest.raises(UnsupportedMediaType, match=name):
        prepare(head + bytes(100))


@pytest.mark.parametrize("form", ["mp4", "mkv", "webm", "mjpeg"])
def test_damaged_files_give_frames_or_media_errors(form):
    rng = np.random.default_rng(5)
    data = clips.video(1, form, frames=20, sound=0.5 if form != "mjpeg" else 0.0)
    ends = set()
    for _ in range(25):
        broken = bytearray(data)
        for place in rng.integers(0, len(data), 4):
            broken[place] = rng.integers(0, 256)
        try:
            prepare(bytes(broken), grid(even(4), sound=True), MEL)
            ends.add("frames")
        except MediaError:
            ends.add("error")
    assert ends == {"frames", "error"}


def test_frames_that_change_their_size():
    pictures = iter([np.zeros((4, 4, 3), np.uint8), np.zeros((4, 6, 3), np.uint8)])
    with pytest.raises(InvalidMedia, match="size"):
        video.resize_frames(pictures, 2, even(), whole, 3)


# Where it runs


async def test_b32_video_and_sound_in_the_locked_process():
    """Nothing that is needed here is forbidden there, and a file that is refused ends nothing."""
    recipe = grid(FrameSampling("qwen2", 2.0, 0, 4, 768, 2), sound=True)
    pool = DecodePool(Recipes("", video=recipe, audio=MEL), Config(decode_processes=1))
    try:
        for form in clips.VIDEOS:
            data = clips.video(1, form, frames=20)
            meta, (pixels,), _ = prepare(data, recipe, MEL)
            ready = await pool.prepare(MediaItem("video", 0, data))
            assert bytes(ready.arrays[0].buffer) == pixels.tobytes()
            assert ready.meta.times == meta.times
            with pytest.raises(InvalidMedia):
                await pool.prepare(MediaItem("video", 0, data[: len(data) // 3]))
        for form in clips.SOUNDS:
            ready = await pool.prepare(MediaItem("audio", 0, clips.sound(1, form)))
            assert ready.arrays[0].dtype == "float32"
    finally:
        await pool.close()
