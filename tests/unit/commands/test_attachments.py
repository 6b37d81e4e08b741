import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from triptych.commands.attachments import file_kind, find_files, media_input, source_kind
from triptych.commands.client import MediaInput
from triptych.errors import StartError

PNG = b"\x89PNG\r\n\x1a\n"


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "sub").mkdir()
    for name in ("a.png", "b c.png", "sub/d", "it's.png", "(e).png"):
        (tmp_path / name).write_bytes(PNG)
    (tmp_path / "s.wav").write_bytes(b"RIFF....WAVEfmt ")
    (tmp_path / "v.mp4").write_bytes(b"\0\0\0 ftypisom")
    (tmp_path / "cat").write_bytes(PNG)
    (tmp_path / "notes.txt").write_text("BM")
    return tmp_path


def image(source):
    return MediaInput("image", source, flagged=False)


A, B = image("a.png"), image("b c.png")
SOUND, CLIP = MediaInput("audio", "s.wav", False), MediaInput("video", "v.mp4", False)


@pytest.mark.parametrize(
    ("line", "content"),
    [
        ("What?", ("What?",)),
        ("a.png", (A,)),
        ("a.png What is this?", (A, "What is this?")),
        ("What is this? a.png", (A, "What is this?")),  # media come first
        ("What is in a.png?", (A, "What is in?")),
        ("a.png s.wav v.mp4 Together?", (A, SOUND, CLIP, "Together?")),
        ("Is a.png like s.wav?", ("Is", A, "like?", SOUND)),  # in their places
        ("Is a.png, then s.wav, louder", ("Is", A, ", then", SOUND, ", louder")),
        ("'b c.png' What?", (B, "What?")),
        ('"b c.png" What?', (B, "What?")),
        (r"b\ c.png What?", (B, "What?")),
        ("b c.png", (B,)),  # the whole line
        ("  'a.png' 'b c.png'  ", (A, B)),
        (r"it\'s.png", (image("it's.png"),)),
        (r"\(e\).png", (image("(e).png"),)),
        ("./a.png", (A,)),
        ("sub/d What?", (image("sub/d"), "What?")),  # by its content
        ("a.png line one\nline two", (A, "line one\nline two")),
    ],
)
def test_files_of_a_line(folder, line, content):
    found = find_files(line)
    assert (found.content, found.missing) == (content, ())


def test_absolute_paths_home_and_file_urls(folder):
    spaced = str(folder / "b c.png")
    for line in (spaced, f"'{spaced}'", spaced.replace(" ", "\\ "), "'~/b c.png'", r"~/b\ c.png"):
        assert find_files(line).content == (image(spaced),), line
        assert find_files(f"What? {line}").content[-1:] != (line,)
    assert find_files(f"{(folder / 'b c.png').as_uri()} What?").content == (image(spaced), "What?")


@pytest.mark.parametrize(
    "line",
    [
        "What's this, and what's that?",
        "it's 'quoted' text",
        "and/or, he/she",
        "Is there a cat?",  # a file of that name, without a slash or a suffix
        "Read notes.txt",
        "https://example.com/a.png",  # the server would fetch it: /attach does
        "sub",
        "sub/",
        "/",
        "a\\",
        '"',
        "x" * 5000 + "/y",
        "\0/a",
    ],
)
def test_text_that_only_looks_like_a_path_stays_text(folder, line):
    found = find_files(line)
    assert (found.content, found.missing) == ((line,), ())


@pytest.mark.parametrize("name", ["none.png", "/not/there.wav", "sub/none.mp4", "~/none.JPG"])
def test_a_file_that_is_not_there_is_reported_and_stays_text(folder, name):
    line = f"a.png What is in {name}?"
    found = find_files(line)
    assert found.content == (A, f"What is in {name}?")
    assert found.missing == (name,)


def test_a_file_that_may_not_be_read_stays_text(folder, monkeypatch):
    def refuse(*_):
        raise PermissionError

    monkeypatch.setattr(Path, "open", refuse)
    assert find_files("sub/d What?").content == ("sub/d What?",)


@given(st.text())
def test_no_text_is_lost(line):
    assert find_files(line).content == ((line.strip(),) if line.strip() else ())


@pytest.mark.parametrize(
    ("name", "head", "kind"),
    [
        ("x", PNG, "image"),
        ("x.wav", PNG, "image"),  # the content decides
        ("x", b"\xff\xd8\xff\xe0", "image"),
        ("x", b"RIFF....WEBPVP8 ", "image"),
        ("x", b"RIFF....WAVEfmt ", "audio"),
        ("x", b"RIFF....AVI LIST", "video"),
        ("x", b"fLaC", "audio"),
        ("x", b"ID3\4", "audio"),
        ("x", b"\0\0\0 ftypavif", "image"),
        ("x", b"\0\0\0 ftypisom", "video"),
        ("x.m4a", b"\0\0\0 ftypisom", "audio"),
        ("x", b"\x1a\x45\xdf\xa3", "video"),
        ("x", b"OggS", "audio"),
        ("x.mp3", b"\xff\xfb", "audio"),
        ("x.PNG", b"", "image"),
        ("x.png", b"no picture", "image"),  # the server says what is wrong with it
        ("x", b"text", None),
        ("x.txt", b"BMW", None),
    ],
)
def test_kinds_of_files(tmp_path, name, head, kind):
    (tmp_path / name).write_bytes(head)
    assert file_kind(tmp_path / name) == kind


def test_what_is_no_file_has_no_kind(tmp_path):
    os.mkfifo(tmp_path / "pipe.png")
    assert file_kind(tmp_path / "pipe.png") is None  # and nobody waits for it
    assert file_kind(tmp_path) is None


@pytest.mark.parametrize(
    ("source", "kind"),
    [
        ("https://example.com/a.JPG?x=1.wav", "image"),
        ("https://example.com/a", None),
        ("data:audio/wav;base64,xx", "audio"),
        ("data:,xx", None),
        ("media://0123", None),
        ("none.mp4", "video"),
    ],
)
def test_kinds_of_sources(source, kind):
    assert source_kind(source) == kind
    if kind is None:
        with pytest.raises(StartError, match="neither name nor content"):
            media_input(source)
    else:
        assert media_input(source) == MediaInput(kind, source, flagged=False)
