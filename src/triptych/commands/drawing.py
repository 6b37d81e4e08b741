"""Draws media and stage times as lines of a terminal, in block characters.

Media come as thumbnails: this module reads no files and decodes nothing.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence

from msgspec import Struct

from triptych.commands.terminal import GREY, RESET, Rgb, Terminal, side_by_side

BARS = " ▁▂▃▄▅▆▇█"
WAVE: Rgb = (110, 170, 240)
FRAME_GAP = 1  # columns
STAGE_NAMES = {  # Server-Timing name: shown name
    "fetch": "fetch",
    "prepare": "decode media",
    "encode": "encode",
    "transfer": "transfer",
    "import": "transfer",  # copying a received KV cache into blocks
    "queue": "queue",
    "prefill": "prefill",
    "decode": "decode",
}
COLOURS: dict[str, Rgb] = {  # as in docs/patterns.svg
    "fetch": (150, 150, 160),
    "decode media": (104, 146, 214),
    "encode": (56, 160, 168),
    "transfer": (226, 214, 110),
    "queue": (110, 110, 120),
    "prefill": (222, 150, 62),
    "decode": (196, 98, 138),
}
LETTERS = {name: name[0] for name in COLOURS} | {"decode media": "m", "queue": "."}
LONGEST_BAR = 60  # columns of a bar
LEAST_QUEUE = 0.01  # of the total: less waiting is not shown


class Thumbnail(Struct, frozen=True):
    """A small copy of a media item: frames of an image (one) or video, or the loudness of audio."""

    width: int = 0
    height: int = 0
    frames: tuple[bytes, ...] = ()  # red, green and blue of width * height pixels
    wave: tuple[float, ...] = ()  # 0 to 1


def draw_frames(small: Thumbnail, terminal: Terminal, width: int, most: int) -> list[str]:
    """Up to ``most`` frames side by side, fewer where the width has no space for them.

    Gives no lines for a terminal without colours.
    """
    if terminal.colours == "none" or not terminal.blocks or not small.frames:
        return []
    count = min(most, len(small.frames), max(1, width // 8))
    each = min(small.width, (width + FRAME_GAP) // count - FRAME_GAP)
    rows = max(1, round(each * small.height / small.width / 2))
    lines: list[str] = []
    for frame in _spread(small.frames, count):
        drawn = _half_blocks(_resize(frame, small, each, 2 * rows), terminal)
        lines = list(side_by_side(lines, drawn, FRAME_GAP)) if lines else drawn
    return lines


def draw_wave(small: Thumbnail, terminal: Terminal, width: int, rows: int = 3) -> list[str]:
    """Loudness over time, as bars."""
    if not terminal.blocks or not small.wave:
        return []
    count = min(width, len(small.wave))
    loud = [max(part) for part in _chunks(small.wave, count)]
    eighths = [round(value * rows * 8) for value in loud]
    lines = []
    for row in reversed(range(rows)):
        bars = (BARS[min(8, max(int(not row), value - 8 * row))] for value in eighths)
        lines.append(terminal.paint("".join(bars), WAVE))
    return lines


def _spread(frames: Sequence[bytes], count: int) -> list[bytes]:
    """``count`` frames at even distances, the first and the last included."""
    last = len(frames) - 1
    return [frames[round(i * last / max(1, count - 1))] for i in range(count)]


def _chunks(values: Sequence[float], count: int) -> list[Sequence[float]]:
    edges = [i * len(values) // count for i in range(count + 1)]
    return [values[a : max(b, a + 1)] for a, b in itertools.pairwise(edges)]


def _resize(frame: bytes, small: Thumbnail, width: int, height: int) -> list[list[Rgb]]:
    """Area-averaged resize."""
    stride = 3 * small.width
    rows = [frame[at : at + stride] for at in range(0, stride * small.height, stride)]
    tall = [
        [sum(rows[at][i] * weight for at, weight in span) for i in range(stride)]
        for span in _spans(small.height, height)
    ]
    across = _spans(small.width, width)
    return [[_average(row, span) for span in across] for row in tall]


def _spans(size: int, count: int) -> list[list[tuple[int, float]]]:
    """For each of ``count`` equal parts of ``size`` pixels: the pixels in it and their weights."""
    spans = []
    for part in range(count):
        start, end = part * size / count, (part + 1) * size / count
        inside = range(int(start), min(size, math.ceil(end)))
        shares = [(at, min(at + 1, end) - max(at, start)) for at in inside]
        spans.append([(at, share * count / size) for at, share in shares if share > 0])
    return spans


def _average(row: Sequence[float], span: Sequence[tuple[int, float]]) -> Rgb:
    red, green, blue = (round(sum(row[3 * at + i] * w for at, w in span)) for i in range(3))
    return red, green, blue


def _half_blocks(pixels: list[list[Rgb]], terminal: Terminal) -> list[str]:
    """Two pixels per character: foreground above, background below."""
    lines = []
    for upper, lower in zip(pixels[::2], pixels[1::2], strict=True):
        line, before = "", None
        for pair in zip(upper, lower, strict=True):
            painted = terminal.paint("▀", *pair).removesuffix(RESET)
            line, before = line + ("▀" if pair == before else painted), pair
        lines.append(line + RESET)
    return lines


class StageTime(Struct, frozen=True):
    name: str
    ms: float


def stage_times(timings: Mapping[str, float]) -> list[StageTime]:
    """The stages that a request passed, in their order."""
    times: dict[str, float] = {}
    for timing, name in STAGE_NAMES.items():
        if timing in timings:
            times[name] = times.get(name, 0.0) + timings[timing]
    whole = sum(times.values())
    if times.get("queue", 0.0) <= whole * LEAST_QUEUE:
        times.pop("queue", None)
    return [StageTime(name, ms) for name, ms in times.items()]


def draw_bar(timings: Mapping[str, float], terminal: Terminal, width: int) -> list[str]:
    """A bar with a part for each stage, and the figures below it."""
    found = stage_times(timings)
    if not found:
        return []
    total = f" {_number(sum(stage.ms for stage in found))} ms"
    cells = _divide([stage.ms for stage in found], max(1, min(width - len(total), LONGEST_BAR)))
    painted = [
        _bar_part(stage.name, count, terminal) for stage, count in zip(found, cells, strict=True)
    ]
    return ["".join(painted) + total, *_figures(found, terminal, width)]


def draw_figures(timings: Mapping[str, float], terminal: Terminal) -> str:
    """The stages of a request in one line, without a bar."""
    found = stage_times(timings)
    figures = [f"{stage.name} {_number(stage.ms)}" for stage in found]
    whole = _number(sum(stage.ms for stage in found))
    return terminal.paint(f"{'  '.join(figures)}  = {whole} ms", GREY)


def _bar_part(name: str, count: int, terminal: Terminal) -> str:
    if not count:
        return ""
    if _uses_letters(terminal):
        return LETTERS[name] * count
    return terminal.paint("█" * count, COLOURS[name])


def _uses_letters(terminal: Terminal) -> bool:
    """Whether the bar consists of letters: the terminal has no colours or no block characters."""
    return terminal.colours == "none" or not terminal.blocks


def _figures(found: Sequence[StageTime], terminal: Terminal, width: int) -> list[str]:
    """Name and time of each stage, with its letter where the bar consists of letters."""
    lines: list[str] = []
    used = width
    for stage in found:
        name = f"{stage.name} ({LETTERS[stage.name]})" if _uses_letters(terminal) else stage.name
        figure = _number(stage.ms)
        size = len(name) + 1 + len(figure)
        words = terminal.paint(name, COLOURS[stage.name]), terminal.paint(figure, GREY)
        text = " ".join(words)
        if size > width:
            lines += words
            used = width
        elif used + 2 + size > width:
            lines.append(text)
            used = size
        else:
            lines[-1] += f"  {text}"
            used += 2 + size
    return lines


def _divide(values: Sequence[float], cells: int) -> list[int]:
    """``cells`` divided in proportion to the values, by the largest remainders."""
    whole = sum(values) or 1.0
    exact = [value / whole * cells for value in values]
    shares = [int(share) for share in exact]
    rest = sorted(range(len(exact)), key=lambda i: shares[i] - exact[i])
    for i in rest[: cells - sum(shares)]:
        shares[i] += 1
    return shares


def _number(ms: float) -> str:
    return f"{ms:.1f}" if ms < 100 else f"{ms:.0f}"
