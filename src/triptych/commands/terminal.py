"""What a terminal can show, and its colours."""

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
    blocks: bool = False  # it can write block characters
    width: int = 80  # columns

    @classmethod
    def of(cls, stream: TextIO, environ: Mapping[str, str] = os.environ) -> Terminal:
        """What a stream leads to. NO_COLOR and what is no terminal get no colours."""
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
    # Hardly a terminal that calls itself plain xterm has fewer than 256.
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
    """Let letters that a stream's encoding lacks be replaced: an answer may have any."""
    if isinstance(stream, io.TextIOWrapper):
        stream.reconfigure(errors="replace")


class _Unwritten(TriptychError):
    """What we have to say cannot be said."""

    code = "output_failed"


def stdout() -> TextIO:
    """Raises TriptychError where it was closed from the start, and is None."""
    if sys.stdout is None:
        raise _Unwritten("stdout cannot be written to: it is closed")
    return sys.stdout


def write_stdout(text: str, end: str = "\n") -> None:
    """To stdout, at once. BrokenPipeError: whoever read it has enough."""
    if not text + end and sys.stdout is None:
        return
    try:
        print(text, end=end, file=stdout(), flush=True)
    except BrokenPipeError:
        raise
    except OSError as error:
        raise _Unwritten(f"stdout cannot be written to: {error.strerror}") from None


def discard_unwritten(stream: TextIO | None) -> None:
    """Forget what a stream holds and nobody takes, which else is tried once more at the exit."""
    if stream is None:  # it was closed from the start
        return
    try:
        stream.flush()
    except OSError:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, stream.fileno())
        os.close(nowhere)


def strip_controls(text: str) -> str:
    """Without what would steer a terminal: an answer is somebody else's text."""
    return _CONTROLS.sub("\ufffd", text)


def display_width(line: str) -> int:
    """How wide a line is that may be painted."""
    return len(_ESCAPES.sub("", line))


def wrap(text: str, width: int, hanging: str = "") -> list[str]:
    return textwrap.wrap(text, max(width, 10), subsequent_indent=hanging) or [""]


def side_by_side(left: Sequence[str], right: Sequence[str], gap: int = 3) -> Iterator[str]:
    """Two columns of lines, painted or not."""
    width = max(map(display_width, left), default=0)
    for row in range(max(len(left), len(right))):
        there = left[row] if row < len(left) else ""
        follows = right[row] if row < len(right) else ""
        yield f"{there}{' ' * (width - display_width(there) + gap)}{follows}".rstrip()
