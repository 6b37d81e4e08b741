import io
import os
import stat
import sys
from pathlib import Path

import pytest

from triptych.commands import line_input
from triptych.commands.line_input import InputHistory, LineInput, complete_input, history_path


@pytest.fixture
def path(tmp_path):
    return tmp_path / "history"


def test_entries_come_back_also_with_several_lines(path):
    history = InputHistory(path)
    assert history.load() == []
    for entry in ("one", "two\nlines", "two\nlines", "ä\u2028", "one"):
        history.add(entry)
    assert InputHistory(path).load() == ["one", "two\nlines", "ä\u2028", "one"]


def test_two_chats_at_once_keep_the_entries_of_both(path):
    first, second = InputHistory(path), InputHistory(path)
    first.add("one")
    second.add("two")
    first.add("three")
    assert InputHistory(path).load() == ["one", "two", "three"]


def test_only_its_owner_reads_it(path):
    path.write_text('"old"\n')
    path.chmod(0o644)
    InputHistory(path).add("new")
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_it_is_bounded(path, monkeypatch):
    monkeypatch.setattr(line_input, "HISTORY_ENTRIES", 3)
    for number in range(6):
        InputHistory(path).add(str(number))
    assert InputHistory(path).load() == ["3", "4", "5"]
    assert path.read_text().count("\n") == 3
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert [one.name for one in path.parent.iterdir()] == ["history"]


def test_a_broken_line_is_left_out(path):
    path.write_bytes(b'"one"\nno json\n{"a": 1}\n"\xff"\n"tw')
    assert InputHistory(path).load() == ["one"]


def test_where_it_is():
    assert history_path({"XDG_STATE_HOME": "/s"}) == Path("/s/triptych/chat_history")
    for environ in ({}, {"XDG_STATE_HOME": ""}, {"XDG_STATE_HOME": "relative"}):
        assert history_path(environ) == Path.home() / ".local/state/triptych/chat_history"


def read_all(monkeypatch, data):
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data)))
    lines = LineInput()
    assert not lines.interactive
    found = []
    while (line := lines.read()) is not None:
        found.append(line)
    return found


@pytest.mark.parametrize(
    ("data", "inputs"),
    [
        (b"", []),
        (b"one\ntwo", ["one", "two"]),
        (b"one \\\ntwo\\\nthree\nfour\n", ["one \ntwo\nthree", "four"]),
        (b"one\\", ["one"]),
        (b"\n\n", ["", ""]),
        (b"\xff\n", ["\ufffd"]),
    ],
)
def test_inputs_of_a_pipe(monkeypatch, data, inputs):
    assert read_all(monkeypatch, data) == inputs


def test_a_pipe_has_no_history(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    read_all(monkeypatch, b"one\n")
    assert list(tmp_path.iterdir()) == []


def test_words_become_names_and_paths(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "my clips").mkdir()
    for name in ("a.png", "all.wav", ".hidden", "my clips/one.mp4"):
        (tmp_path / name).touch()
    names = ["/new", "/attach"]
    assert complete_input("/ne", names) == ["/new"]
    assert complete_input("a", names) == ["a.png", "all.wav"]
    assert complete_input("m", names) == ["my\\ clips/"]
    assert complete_input("my\\ clips/", names) == ["my\\ clips/one.mp4"]
    assert complete_input("~/al", names) == ["~/all.wav"]
    assert complete_input(f"{tmp_path}/.h", names) == [f"{tmp_path}/.hidden"]
    assert complete_input("none/x", names) == []
    assert "/etc/" in complete_input("/et", names)


def test_a_history_that_cannot_be_written_ends_in_a_note(tmp_path, monkeypatch, capsys):
    """A file stands where its folder should be."""
    (tmp_path / "triptych").write_text("")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    lines = LineInput(history=False)
    lines._open_history()
    assert "inputs are not kept: " in capsys.readouterr().err
    assert lines._history is None
    assert os.listdir(tmp_path) == ["triptych"]
