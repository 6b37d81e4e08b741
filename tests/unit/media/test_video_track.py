import io

import av
import pytest

from support import clips
from triptych.config import Limits
from triptych.errors import InvalidMedia
from triptych.media import video_track
from triptych.media.container import VIDEO_CONTAINERS, open_container


def frames(data, indices):
    """Time stamps of the frames of these indices, and how many frames there are."""
    with open_container(memoryview(data), "video", VIDEO_CONTAINERS, Limits()) as container:
        made = video_track.read_track(container, memoryview(data), Limits())
        return [frame.pts for frame in video_track.seek_frames(made, indices)], made.frames


def fed(data, indices):
    """How many packets the decoder is given for these frames."""
    calls = 0

    def counted(*args):
        nonlocal calls
        calls += 1
        return decode(*args)

    decode = video_track._decode
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(video_track, "_decode", counted)
        with open_container(memoryview(data), "video", VIDEO_CONTAINERS, Limits()) as container:
            made = video_track.read_track(container, memoryview(data), Limits())
            assert len([*video_track.seek_frames(made, indices)]) == len(indices)
    return calls


def test_few_frames_of_many_are_decoded():
    data = clips.video(1, frames=100, gop=10)
    assert fed(data, [0, 50, 99]) < 20
    assert fed(data, [55]) <= 10
    assert fed(data, [*range(100)]) <= 101
    assert fed(clips.video(1, "mjpeg", frames=50), [3, 30, 49]) == 3


def test_frames_without_times_are_counted():
    data = clips.video(1, frames=12)
    with open_container(memoryview(data), "video", VIDEO_CONTAINERS, Limits()) as container:
        made = video_track.read_track(container, memoryview(data), Limits())
        timeless = video_track.VideoTrack(made.stream, made.packets, made.shown[:6], 12, made.rate)
        with pytest.raises(video_track.IrregularTrack):
            next(video_track.seek_frames(timeless, [3]))
        assert video_track.count_frames(timeless) == 12
        assert [frame.pts for frame in video_track.scan_frames(timeless, [3, 9])] == [
            made.shown[3],
            made.shown[9],
        ]


def test_frames_that_are_not_shown_are_not_counted():
    """VP8 has frames that others refer to and no viewer sees."""
    data = clips.video(1, "webm", frames=20)
    with av.open(io.BytesIO(data)) as container:
        packets = [bytes(packet) for packet in container.demux(video=0) if packet.size]
    at = data.index(packets[5])
    hidden = data[:at] + bytes([packets[5][0] & ~0x10]) + data[at + 1 :]
    with av.open(io.BytesIO(hidden)) as container:
        stamps = [frame.pts for frame in container.decode(video=0)]
    assert len(stamps) == 19
    assert frames(hidden, [*range(19)]) == (stamps, 19)


def test_a_clip_may_begin_late():
    """What was cut out of a longer stream keeps that one's times."""
    late = [1_000_000_000 + 40 * number for number in range(20)]
    data = clips.video(1, "mkv", frames=20, stamps=late)
    assert len(frames(data, [0, 10])[0]) == 2


def test_packets_that_are_more_than_the_file(monkeypatch):
    monkeypatch.setattr(video_track, "_SPARE", 0)
    data = clips.video(1, "mjpeg")
    with (
        pytest.raises(InvalidMedia, match="larger than its file"),
        open_container(memoryview(data), "video", VIDEO_CONTAINERS, Limits()) as container,
    ):
        video_track.read_track(container, memoryview(data)[:1000], Limits())
