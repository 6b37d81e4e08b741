"""Media in small, drawn with block characters: pictures, rows of frames, the shape of a sound."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

from msgspec import Struct

from triptych.commands.show.terminal import RESET, Rgb, Terminal, side_by_side

BARS = " ▁▂▃▄▅▆▇█"
WAVE: Rgb = (110, 170, 240)
GAP = 1  # columns between frames


class Thumbnail(Struct, frozen=True):
    """A medium as it is drawn: frames of a picture (one) or clip, or the loudness of a sound."""

    width: int = 0
    height: int = 0
    frames: tuple[bytes, ...] = ()  # red, green and blue of width * height pixels
    wave: tuple[float, ...] = ()  # 0 to 1


def draw_frames(small: Thumbnail, terminal: Terminal, width: int, most: int) -> list[str]:
    """The frames side by side, some of them left out where ``most`` or the width ask for it.

    No line where the terminal has no colours: there is nothing to see then.
    """
    if terminal.colours == "none" or not terminal.blocks or not small.frames:
        return []
    count = min(most, len(small.frames), max(1, width // 8))
    each = min(small.width, (width + GAP) // count - GAP)
    rows = max(1, round(each * small.height / small.width / 2))
    lines: list[str] = []
    for frame in _spread(small.frames, count):
        drawn = _half_blocks(_resized(frame, small, each, 2 * rows), terminal)
        lines = list(side_by_side(lines, drawn, GAP)) if lines else drawn
    return lines


def draw_wave(small: Thumbnail, terminal: Terminal, width: int, rows: int = 3) -> list[str]:
    """Loudness over time, as bars of block characters."""
    if not terminal.blocks or not small.wave:
        return []
    count = min(width, len(small.wave))
    loud = [max(part) for part in _parts(small.wave, count)]
    eighths = [round(value * rows * 8) for value in loud]
    lines = []
    for row in reversed(range(rows)):
        bars = (BARS[min(8, max(int(not row), value - 8 * row))] for value in eighths)
        lines.append(terminal.paint("".join(bars), WAVE))
    return lines


def _spread(frames: Sequence[bytes], count: int) -> list[bytes]:
    """Some of all, the first and the last among them."""
    last = len(frames) - 1
    return [frames[round(i * last / max(1, count - 1))] for i in range(count)]


def _parts(values: Sequence[float], count: int) -> list[Sequence[float]]:
    edges = [i * len(values) // count for i in range(count + 1)]
    return [values[a : max(b, a + 1)] for a, b in itertools.pairwise(edges)]


def _resized(frame: bytes, small: Thumbnail, width: int, height: int) -> list[list[Rgb]]:
    """Each new pixel is the average of the area that it stands for."""
    stride = 3 * small.width
    rows = [frame[at : at + stride] for at in range(0, stride * small.height, stride)]
    tall = [
        [sum(rows[at][i] * weight for at, weight in span) for i in range(stride)]
        for span in _spans(small.height, height)
    ]
    across = _spans(small.width, width)
    return [[_mixed(row, span) for span in across] for row in tall]


def _spans(size: int, count: int) -> list[list[tuple[int, float]]]:
    """For each of ``count`` equal parts of a line of ``size`` pixels: these, and their shares."""
    spans = []
    for part in range(count):
        start, end = part * size / count, (part + 1) * size / count
        inside = range(int(start), min(size, math.ceil(end)))
        shares = [(at, min(at + 1, end) - max(at, start)) for at in inside]
        spans.append([(at, share * count / size) for at, share in shares if share > 0])
    return spans


def _mixed(row: Sequence[float], span: Sequence[tuple[int, float]]) -> Rgb:
    red, green, blue = (round(sum(row[3 * at + i] * w for at, w in span)) for i in range(3))
    return red, green, blue


def _half_blocks(pixels: list[list[Rgb]], terminal: Terminal) -> list[str]:
    """Two pixels to a character: the upper one is its front, the lower one its back."""
    lines = []
    for upper, lower in zip(pixels[::2], pixels[1::2], strict=True):
        line, before = "", None
        for pair in zip(upper, lower, strict=True):
            painted = terminal.paint("▀", *pair).removesuffix(RESET)
            line, before = line + ("▀" if pair == before else painted), pair
        lines.append(line + RESET)
    return lines
