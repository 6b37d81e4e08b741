"""Reasoning before the answer, between two markers.

It is looked for at the beginning of an output only: later the markers are text like any other.
Line breaks beside the markers belong to these, as chat templates write them.
"""

from __future__ import annotations

from msgspec import Struct

from triptych.parsers.base import NOTHING, OutputParser, ParsedOutput
from triptych.parsers.reader import Markers


class ReasoningMarkers(Struct, frozen=True):
    opening: str
    closing: str

    def opened_by(self, prompt: str) -> bool:
        """Whether the output begins inside, since the prompt ends with the opening marker."""
        return prompt.rstrip().endswith(self.opening)


class ReasoningParser:
    """Passes what follows the reasoning to another parser; without one it is content."""

    def __init__(
        self, markers: ReasoningMarkers, inside: bool = False, rest: OutputParser | None = None
    ) -> None:
        self._opening = markers.opening
        self._closing = Markers(markers.closing)
        self._inside = inside
        self._rest: OutputParser = PlainText() if rest is None else rest
        self._step = self._begin
        self._held = ""  # possibly the beginning of a marker
        self._space: list[str] = []  # white space that may be beside a marker

    @property
    def inside(self) -> bool:
        """Whether what comes next is reasoning, as far as is known."""
        return self._inside

    def push(self, text: str) -> ParsedOutput:
        return self._step(text) if text else NOTHING

    def finish(self) -> ParsedOutput:
        held = "".join((*self._space, self._held))
        if self._inside and self._step == self._begin:  # line breaks after the prompt's marker
            held = held.lstrip("\n")
        self._step = self._rest.push  # a method of its own would be a reference cycle
        if not self._inside:
            return join(self._rest.push(held) if held else NOTHING, self._rest.finish())
        return join(ParsedOutput(reasoning=held), self._rest.finish())

    def _begin(self, text: str) -> ParsedOutput:
        """The opening marker may follow, also where the prompt had one already."""
        text = self._held + text
        start = text if self._held else text.lstrip()
        self._space.append(text[: len(text) - len(start)])
        if len(start) < len(self._opening) and self._opening.startswith(start):
            self._held = start
            return NOTHING
        self._held = ""
        if start.startswith(self._opening):
            self._space.clear()
            self._inside = True
            return self._enter(start[len(self._opening) :])
        before = "".join((*self._space, start))
        self._space.clear()
        if self._inside:
            return self._enter(before)
        self._step = self._rest.push
        return self._rest.push(before)

    def _enter(self, text: str) -> ParsedOutput:
        """Line breaks after the opening marker."""
        text = text.lstrip("\n")
        self._step = self._think if text else self._enter
        return self._think(text) if text else NOTHING

    def _think(self, text: str) -> ParsedOutput:
        text = self._held + text
        start, end = self._closing.find(text, 0)
        thought = text[:start].rstrip("\n")
        breaks = text[len(thought) : start]
        if start < end:
            self._held = ""
            self._inside = False
            reasoning = "".join((*self._space, thought)) if thought else ""
            self._space.clear()
            return join(ParsedOutput(reasoning=reasoning), self._leave(text[end:]))
        self._held = text[start:]
        if not thought:
            self._space.append(breaks)
            return NOTHING
        reasoning = "".join((*self._space, thought))
        self._space = [breaks]
        return ParsedOutput(reasoning=reasoning)

    def _leave(self, text: str) -> ParsedOutput:
        """Line breaks after the closing marker."""
        text = text.lstrip("\n")
        self._step = self._rest.push if text else self._leave
        return self._rest.push(text) if text else NOTHING


class PlainText:
    """All is content."""

    def push(self, text: str) -> ParsedOutput:
        return ParsedOutput(text)

    def finish(self) -> ParsedOutput:
        return NOTHING


def join(*parts: ParsedOutput) -> ParsedOutput:
    """One output of several in a row."""
    return ParsedOutput(
        "".join(part.content for part in parts),
        "".join(part.reasoning for part in parts),
        tuple(call for part in parts for call in part.calls),
        any(part.cut for part in parts),
    )
