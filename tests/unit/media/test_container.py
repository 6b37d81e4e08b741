"""What differs between the versions of PyAV that are supported, on whichever is installed."""

import errno
import importlib.util
import sys

import av
import pytest

from support import clips
from triptych.config import Limits
from triptych.errors import InvalidMedia
from triptych.media import container, lockdown, video_track

SOUND = clips.sound(1, "wav", seconds=0.1, rate=16000)


def loaded(module):
    """The module once more, as it loads now."""
    spec = importlib.util.spec_from_file_location("once_more", module.__file__)
    copy = importlib.util.module_from_spec(spec)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "once_more", copy)  # where dataclasses look
        spec.loader.exec_module(copy)
    return copy


OLD = {"format", "options", "metadata_errors"}


@pytest.mark.parametrize(
    ("version", "words", "threads"),
    [
        ("14.1.0", OLD, False),
        ("16.1.0", OLD, False),
        ("17.0.0", OLD, True),
        ("18.1.0", OLD, True),
        ("19.0.2", OLD - {"metadata_errors"}, True),
    ],
)
def test_files_are_opened_by_the_words_of_each_version(monkeypatch, version, words, threads):
    real = av.open

    def strict(file, mode, **given):
        assert given.keys() == words
        return real(file, mode, **{name: given[name] for name in ("format", "options")})

    monkeypatch.setattr(av, "__version__", version)
    monkeypatch.setattr(av, "open", strict)
    ours = loaded(container)
    with ours.open_container(memoryview(SOUND), "audio", frozenset({"wav"}), Limits()) as opened:
        assert opened.streams.audio
    monkeypatch.setattr(container, "PYAV", ours.PYAV)
    assert ("threads" in loaded(video_track)._THREADS) == threads


def test_tags_that_are_not_utf_8_are_ignored():
    tag = b"INFOINAM" + (4).to_bytes(4, "little") + b"\xe9\xff\xfe\0"
    body = SOUND[12:] + b"LIST" + len(tag).to_bytes(4, "little") + tag
    data = b"RIFF" + (len(body) + 4).to_bytes(4, "little") + b"WAVE" + body
    with container.open_container(
        memoryview(data), "audio", frozenset({"wav"}), Limits()
    ) as opened:
        assert [*opened.decode(audio=0)]


@pytest.mark.parametrize(("room", "raised"), [(True, InvalidMedia), (False, MemoryError)])
def test_out_of_memory_differs_from_a_file_that_asks_for_too_much(monkeypatch, room, raised):
    monkeypatch.setattr(lockdown, "can_allocate", lambda size: room)
    with (
        pytest.raises(raised),
        container.open_container(memoryview(SOUND), "audio", frozenset({"wav"}), Limits()),
    ):
        raise av.error.MemoryError(errno.ENOMEM, "Cannot allocate memory")
