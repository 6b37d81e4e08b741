"""Makes docs/demo.svg of a real run: ``python tools/demo_picture.py [what triptych demo takes]``.

The demo runs in a terminal of its own that has all colours; what it writes there is drawn as a
window. ``--from FILE`` draws what was kept of another run.
"""

from __future__ import annotations

import argparse
import fcntl
import os
import pty
import re
import struct
import subprocess
import sys
import termios
from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from html import escape
from pathlib import Path

OUT = Path(__file__).parents[1] / "docs/demo.svg"
COLUMNS = 84
WIDTH, HEIGHT, SIZE = 8, 17, 13  # of a cell, and of its letters; in pixels
MARGIN, BAR = 18, 34  # around the text; the window's title
FRONT, BACK, TITLE = "#d7d7de", "#17181c", "#26272d"
LIGHTS = ("#ec6a5e", "#f4bf4f", "#61c554")
EIGHTHS = {char: n for n, char in enumerate("▁▂▃▄▅▆▇█", 1)}
_STEP = re.compile(r"\x1b\[([0-9;]*)m")


@dataclass(frozen=True)
class Style:
    front: str = FRONT
    back: str = ""

    def after(self, codes: str) -> Style:
        """With what an escape sequence sets: a colour in 24 bits, or none any more."""
        style, numbers = self, [int(code or 0) for code in codes.split(";")]
        while numbers:
            match numbers:
                case [38 | 48 as plane, 2, red, green, blue, *numbers]:
                    colour = f"#{red:02x}{green:02x}{blue:02x}"
                    style = replace(style, **{"front" if plane == 38 else "back": colour})
                case [0, *numbers]:
                    style = Style()
                case _:
                    raise ValueError(f"no picture of escape sequence {codes}")
        return style


@dataclass(frozen=True)
class Run:
    """Letters of one style that stand in a row."""

    row: int
    column: int
    text: str
    style: Style


def runs(text: str) -> Iterator[Run]:
    for row, line in enumerate(text.split("\n")):
        style, column = Style(), 0
        for number, part in enumerate(_STEP.split(line)):
            if number % 2:
                style = style.after(part)
            elif part:
                yield Run(row, column, part, style)
                column += len(part)


def svg(text: str, title: str = "triptych demo") -> str:
    """A window that shows a terminal's text, its half blocks and bars as areas."""
    lines = text.split("\n")
    wide = WIDTH * COLUMNS + 2 * MARGIN
    high = BAR + HEIGHT * len(lines) + 2 * MARGIN
    areas: dict[str, list[str]] = {}  # by colour
    words: list[str] = []
    for run in runs(text):
        x, y = MARGIN + WIDTH * run.column, BAR + MARGIN + HEIGHT * run.row
        for colour, area in _areas(run, x, y):
            areas.setdefault(colour, []).append(area)
        words += _words(run, x, y)
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {wide} {high}" role="img">',
            f"<title>{escape(title)}</title>",
            f'<rect width="{wide}" height="{high}" rx="9" fill="{BACK}"/>',
            f'<path d="M0 {BAR}V9q0-9 9-9H{wide - 9}q9 0 9 9V{BAR}z" fill="{TITLE}"/>',
            *(
                f'<circle cx="{20 + 20 * i}" cy="17" r="6" fill="{c}"/>'
                for i, c in enumerate(LIGHTS)
            ),
            f'<g font-family="{FONTS}" font-size="{SIZE}">',
            f'<text x="{wide / 2}" y="22" fill="#9a9aa4" text-anchor="middle">',
            f"{escape(title)}</text>",
            '<g shape-rendering="crispEdges">',
            *(f'<path fill="{colour}" d="{"".join(all)}"/>' for colour, all in areas.items()),
            "</g>",
            *words,
            "</g>",
            "</svg>\n",
        ]
    )


FONTS = "ui-monospace, 'SF Mono', Menlo, Consolas, 'DejaVu Sans Mono', monospace"


def _areas(run: Run, x: int, y: int) -> Iterator[tuple[str, str]]:
    """Backgrounds and block characters, as rectangles of a path; equal neighbours as one."""
    half = HEIGHT / 2
    if run.style.back:
        yield run.style.back, _area(x, y, WIDTH * len(run.text), HEIGHT)
    for found in re.finditer(r"(.)\1*", run.text):
        char, left = found[1], x + WIDTH * found.start()
        across = WIDTH * len(found[0])
        if char == "▀":
            yield run.style.front, _area(left, y, across, half)
        elif char in EIGHTHS:
            tall = HEIGHT * EIGHTHS[char] / 8
            yield run.style.front, _area(left, y + HEIGHT - tall, across, tall)


def _area(x: float, y: float, width: float, height: float) -> str:
    return f"M{x:g} {y:g}h{width:g}v{height:g}h-{width:g}z"


def _words(run: Run, x: int, y: int) -> Iterator[str]:
    """Words at their columns, whatever font the reader has."""
    for found in re.finditer(r"[^\s▀▁-█]+(?: [^\s▀▁-█]+)*", run.text):
        left, wide = x + WIDTH * found.start(), WIDTH * len(found[0])
        yield (
            f'<text x="{left}" y="{y + SIZE}" textLength="{wide}" fill="{run.style.front}">'
            f"{escape(found[0])}</text>"
        )


def captured(words: list[str]) -> str:
    """What ``triptych demo`` writes to a terminal with all colours."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, COLUMNS, 0, 0))
    env = os.environ | {"TERM": "xterm-256color", "COLORTERM": "truecolor"}
    for name in ("NO_COLOR", "COLUMNS"):
        env.pop(name, None)
    argv = [sys.executable, "-m", "triptych", "demo", *words]
    process = subprocess.Popen(argv, stdout=theirs, stdin=theirs, env=env)
    os.close(theirs)
    heard = b""
    while piece := _read(ours):
        heard += piece
    os.close(ours)
    if process.wait():
        sys.exit(f"triptych demo failed:\n{heard.decode(errors='replace')}")
    return heard.decode().replace("\r\n", "\n")


def _read(terminal: int) -> bytes:
    try:
        return os.read(terminal, 1 << 16)
    except OSError:  # how a terminal says that nobody writes to it any more
        return b""


def tidied(text: str, shown: Collection[str] = ()) -> str:
    """With the command that was typed, without how the start went on, and with these examples."""
    lines = [line for line in text.rstrip().split("\n") if not line.startswith("starting ")]
    head, *examples = re.split(r"\n\n(?=  .*\d/\d+  (?:picture|clip|sound) )", "\n".join(lines))
    *examples, last = [*examples[:-1], *examples[-1].rsplit("\n\n", 1)] if examples else [""]
    kept = [e for e in examples if not shown or _number(e) in shown]
    return "\n\n".join([f"$ make demo\n{head}", *kept, last]).rstrip()


def _number(example: str) -> str:
    """``3`` of ``3/8  sound seven.wav``."""
    found = re.search(r"(\d+)/\d+  ", _STEP.sub("", example))
    return found[1] if found else ""


def main() -> None:
    parser = argparse.ArgumentParser(description="Make docs/demo.svg of a real run.")
    parser.add_argument("--from", dest="kept", type=Path, help="what a run wrote")
    parser.add_argument("--shown", default="", help="numbers of examples, with commas; none: all")
    parser.add_argument("--out", type=Path, default=OUT)
    given, words = parser.parse_known_args()
    text = given.kept.read_text() if given.kept else captured(words)
    shown = [number for number in given.shown.split(",") if number]
    title = "triptych demo (an excerpt)" if shown else "triptych demo"
    given.out.write_text(svg(tidied(text, shown), title))


if __name__ == "__main__":
    main()
