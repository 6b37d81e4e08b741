"""Terminals: colours, widths, and writing to stdout."""

from __future__ import annotations

import io
import os
import re
import shutil
import sys
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from typing import Literal, TextIO

from msgspec import Struct

from triptych.errors import TriptychError

Colours = Literal["none", "some", "all"]  # none; the 216 of the usual cube; 24 bits
Rgb = tuple[int, int, int]

RESET = "\x1b[0m"
GREY: Rgb = (140, 140, 150)
GREEN: Rgb = (90, 190, 110)
RED: Rgb = (230, 90, 90)
_ESCAPES = re.compile(r"\x1b\[[0-9;]*m")
_CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


class Terminal(Struct, frozen=True):
    colours: Colours = "none"
    blocks: bool = False  # its encoding has block characters
    width: int = 80  # columns

    @classmethod
    def of(cls, stream: TextIO, environ: Mapping[str, str] = os.environ) -> Terminal:
        """The terminal of a stream. NO_COLOR and files get no colours."""
        width = shutil.get_terminal_size((80, 24)).columns if stream.isatty() else 80
        return cls(_colours(stream, environ), _writes_blocks(stream), width)

    def paint(self, text: str, front: Rgb | None, back: Rgb | None = None) -> str:
        codes = [_code(self.colours, at, c) for at, c in ((38, front), (48, back)) if c is not None]
        if self.colours == "none" or not codes:
            return text
        return f"\x1b[{';'.join(codes)}m{text}{RESET}"


def _colours(stream: TextIO, environ: Mapping[str, str]) -> Colours:
    kind = environ.get("TERM", "")
    if environ.get("NO_COLOR") or not stream.isatty() or kind in ("", "dumb"):
        return "none"
    if environ.get("COLORTERM", "") in ("truecolor", "24bit") or "direct" in kind:
        return "all"
    # Nearly every terminal with TERM=xterm has 256 colours.
    return "some" if "256" in kind or kind == "xterm" else "none"


def _writes_blocks(stream: TextIO) -> bool:
    try:
        "▀█".encode(stream.encoding or "ascii")
    except (UnicodeEncodeError, LookupError):
        return False
    return True


def _code(colours: Colours, plane: int, colour: Rgb) -> str:
    if colours == "all":
        return f"{plane};2;{colour[0]};{colour[1]};{colour[2]}"
    red, green, blue = (round(value / 255 * 5) for value in colour)
    return f"{plane};5;{16 + 36 * red + 6 * green + blue}"


def replace_unencodable(stream: TextIO) -> None:
    """Replace characters that the stream's encoding lacks: an answer may contain any."""
    if isinstance(stream, io.TextIOWrapper):
        stream.reconfigure(errors="replace")


class _OutputFailed(TriptychError):
    """stdout cannot be written."""

    code = "output_failed"


def stdout() -> TextIO:
    """sys.stdout. Raises TriptychError if it was closed from the start."""
    if sys.stdout is None:
        raise _OutputFailed("stdout cannot be written to: it is closed")
    return sys.stdout


def write_stdout(text: str, end: str = "\n") -> None:
    """Write and flush. BrokenPipeError: the reader has closed the pipe."""
    if not text + end and sys.stdout is None:
        return
    try:
        print(text, end=end, file=stdout(), flush=True)
    except BrokenPipeError:
        raise
    except OSError as error:
        raise _OutputFailed(f"stdout cannot be written to: {error.strerror}") from None


def write_answer(text: str) -> None:
    """Write a piece of an answer, to a terminal without control characters."""
    write_stdout(strip_controls(text) if stdout().isatty() else text, end="")


def discard_unwritten(stream: TextIO | None) -> None:
    """Drop buffered output that cannot be written, so that the exit does not try again."""
    if stream is None:  # closed from the start
        return
    try:
        stream.flush()
    except OSError:
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, stream.fileno())
        os.close(null)


def strip_controls(text: str) -> str:
    """The text without control characters: an answer must not steer the terminal."""
    return _CONTROLS.sub("\ufffd", text)


def display_width(line: str) -> int:
    """Columns of a line, without its escape sequences."""
    return len(_ESCAPES.sub("", line))


def wrap(text: str, width: int, hanging: str = "") -> list[str]:
    return textwrap.wrap(text, max(width, 10), subsequent_indent=hanging) or [""]


def side_by_side(left: Sequence[str], right: Sequence[str], gap: int = 3) -> Iterator[str]:
    """Two columns of lines."""
    width = max(map(display_width, left), default=0)
    for row in range(max(len(left), len(right))):
        there = left[row] if row < len(left) else ""
        follows = right[row] if row < len(right) else ""
        yield f"{there}{' ' * (width - display_width(there) + gap)}{follows}".rstrip()
