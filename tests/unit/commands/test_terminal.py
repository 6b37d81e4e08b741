import io
import sys

import pytest

from triptych.commands.terminal import (
    Terminal,
    display_width,
    replace_unencodable,
    side_by_side,
    strip_controls,
    wrap,
    write_stdout,
)
from triptych.errors import TriptychError

TRUE = {"TERM": "xterm-256color", "COLORTERM": "truecolor"}


class Stream(io.StringIO):
    def __init__(self, tty=True, encoding="utf-8"):
        super().__init__()
        self._tty, self._encoding = tty, encoding

    @property
    def encoding(self):
        return self._encoding

    def isatty(self):
        return self._tty


@pytest.mark.parametrize(
    ("tty", "environ", "colours"),
    [
        (True, TRUE, "all"),
        (True, {"TERM": "xterm-256color"}, "some"),
        (True, {"TERM": "xterm-direct"}, "all"),
        (True, TRUE | {"NO_COLOR": "1"}, "none"),
        (True, TRUE | {"NO_COLOR": ""}, "all"),
        (True, TRUE | {"TERM": "dumb"}, "none"),
        (True, {"TERM": "vt100"}, "none"),
        (True, {"TERM": "xterm"}, "some"),
        (False, {"TERM": "xterm"}, "none"),
        (True, {}, "none"),
        (False, TRUE, "none"),
    ],
)
def test_colours_are_for_terminals_that_have_them(tty, environ, colours):
    assert Terminal.of(Stream(tty), environ).colours == colours


def test_the_width_is_the_terminals(monkeypatch):
    monkeypatch.setenv("COLUMNS", "47")
    assert Terminal.of(Stream(), {}).width == 47
    assert Terminal.of(Stream(tty=False), {}).width == 80


@pytest.mark.parametrize(("encoding", "blocks"), [("utf-8", True), ("ascii", False), (None, False)])
def test_blocks_need_an_encoding_that_has_them(encoding, blocks):
    assert Terminal.of(Stream(encoding=encoding), {}).blocks is blocks


def test_paint():
    assert Terminal("all").paint("x", (1, 2, 3)) == "\x1b[38;2;1;2;3mx\x1b[0m"
    painted = Terminal("all").paint("x", (1, 2, 3), (4, 5, 6))
    assert painted == "\x1b[38;2;1;2;3;48;2;4;5;6mx\x1b[0m"
    assert Terminal("some").paint("x", (255, 0, 0)) == "\x1b[38;5;196mx\x1b[0m"
    assert Terminal("none").paint("x", (1, 2, 3)) == Terminal("all").paint("x", None) == "x"


def test_letters_that_a_stream_lacks_are_replaced():
    with io.TextIOWrapper(io.BytesIO(), "ascii") as stream:
        replace_unencodable(stream)
        stream.write("aé")
        stream.flush()
        assert stream.buffer.getvalue() == b"a?"
    replace_unencodable(io.StringIO())


def test_writing_to_a_closed_stdout_fails(monkeypatch):
    monkeypatch.setattr(sys, "stdout", None)
    write_stdout("", end="")
    for text in ("x", ""):
        with pytest.raises(TriptychError, match="it is closed"):
            write_stdout(text)


def test_an_answer_cannot_steer_the_terminal():
    assert strip_controls("a\x1b[2Jb\x9bc\rd\ne\tf é") == "a\ufffd[2Jb\ufffdc\ufffdd\ne\tf é"


def test_columns_are_counted_without_colours():
    assert display_width(Terminal("all").paint("four", (1, 2, 3), (4, 5, 6))) == 4


def test_two_columns_stand_beside_each_other():
    painted = Terminal("all").paint("ab", (1, 2, 3))
    assert list(side_by_side([painted, "c"], ["x", "y", "z"], 1)) == [
        f"{painted} x",
        "c  y",
        "   z",
    ]


def test_long_text_is_wrapped():
    assert wrap("one two three", 10, "  ") == ["one two", "  three"]
    assert wrap("", 10) == [""]
