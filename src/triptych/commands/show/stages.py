"""Where a request's time went: a bar with a part for each stage, and the figures below it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from msgspec import Struct

from triptych.commands.show.terminal import GREY, Rgb, Terminal

NAMES = {  # as the server tells them: as people read them
    "fetch": "fetch",
    "prepare": "decode media",
    "encode": "encode",
    "transfer": "transfer",
    "import": "transfer",  # a KV cache that came over has to be put in its place
    "queue": "queue",
    "prefill": "prefill",
    "decode": "decode",
}
COLOURS: dict[str, Rgb] = {  # encode, prefill and decode as in the pictures of the documents
    "fetch": (150, 150, 160),
    "decode media": (104, 146, 214),
    "encode": (56, 160, 168),
    "transfer": (226, 214, 110),
    "queue": (110, 110, 120),
    "prefill": (222, 150, 62),
    "decode": (196, 98, 138),
}
LETTERS = {name: name[0] for name in COLOURS} | {"decode media": "m", "queue": "."}
LONGEST = 60  # columns of a bar
UNSEEN = 0.01  # of the whole: so little waiting is not worth a word


class StageTime(Struct, frozen=True):
    name: str
    ms: float


def stage_times(timings: Mapping[str, float]) -> list[StageTime]:
    """Those that a request went through, in their order."""
    spent: dict[str, float] = {}
    for told, name in NAMES.items():
        if told in timings:
            spent[name] = spent.get(name, 0.0) + timings[told]
    whole = sum(spent.values())
    if spent.get("queue", 0.0) <= whole * UNSEEN:
        spent.pop("queue", None)
    return [StageTime(name, ms) for name, ms in spent.items()]


def draw_bar(timings: Mapping[str, float], terminal: Terminal, width: int) -> list[str]:
    """The bar and, below it, the figures in as many lines as they need."""
    found = stage_times(timings)
    if not found:
        return []
    total = f" {_number(sum(stage.ms for stage in found))} ms"
    cells = _shares([stage.ms for stage in found], max(1, min(width - len(total), LONGEST)))
    painted = [
        _part(stage.name, count, terminal) for stage, count in zip(found, cells, strict=True)
    ]
    return ["".join(painted) + total, *_figures(found, terminal, width)]


def _part(name: str, count: int, terminal: Terminal) -> str:
    if not count:
        return ""
    if _lettered(terminal):
        return LETTERS[name] * count
    return terminal.paint("█" * count, COLOURS[name])


def _lettered(terminal: Terminal) -> bool:
    """Whether stages are told apart by letters, for want of colours or of blocks."""
    return terminal.colours == "none" or not terminal.blocks


def _figures(found: Sequence[StageTime], terminal: Terminal, width: int) -> list[str]:
    """Each with the letter that stands for it in the bar, where it has letters."""
    lines: list[str] = []
    used = width
    for stage in found:
        name = f"{stage.name} ({LETTERS[stage.name]})" if _lettered(terminal) else stage.name
        figure = _number(stage.ms)
        size = len(name) + 1 + len(figure)
        words = terminal.paint(name, COLOURS[stage.name]), terminal.paint(figure, GREY)
        told = " ".join(words)
        if size > width:
            lines += words
            used = width
        elif used + 2 + size > width:
            lines.append(told)
            used = size
        else:
            lines[-1] += f"  {told}"
            used += 2 + size
    return lines


def _shares(values: Sequence[float], cells: int) -> list[int]:
    """Whole cells in proportion, none lost: what is left over goes to the largest remainders."""
    whole = sum(values) or 1.0
    exact = [value / whole * cells for value in values]
    given = [int(share) for share in exact]
    rest = sorted(range(len(exact)), key=lambda i: given[i] - exact[i])
    for i in rest[: cells - sum(given)]:
        given[i] += 1
    return given


def _number(ms: float) -> str:
    return f"{ms:.1f}" if ms < 100 else f"{ms:.0f}"
