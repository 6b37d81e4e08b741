"""Reads a format as its text arrives, and collects what is certain.

A format is a generator that reads with ``yield from`` and waits for more text at each ``yield``.
It decides by one character at a time, so the result does not depend on how the text is divided,
and it never goes back, so the work is linear in the text. What it has read of a call that is not
certain yet stays in a record; if the next character does not fit, the record becomes content.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator
from typing import TypeVar

from triptych.parsers.base import NOTHING, KnownFunctions, ParsedOutput, ToolCallDelta

T = TypeVar("T")
Reading = Generator[None, None, T]

NAME = re.compile(r"[\w.:/-]+")  # of a function or a parameter
NAME_CHARACTERS = 256
_SPACE = re.compile(r"\s+")


class Markers:
    """Finds the first of several strings, and where the beginning of one may stand."""

    __slots__ = ("_begins", "_find", "_heads", "_reach")

    def __init__(self, *markers: str) -> None:
        longest_first = sorted(markers, key=len, reverse=True)
        self._find = re.compile("|".join(map(re.escape, longest_first))).search
        self._heads = frozenset(marker[:end] for marker in markers for end in range(len(marker)))
        self._begins = re.compile(f"[{''.join(re.escape(marker[0]) for marker in markers)}]").search
        self._reach = max(map(len, markers)) - 1

    def find(self, text: str, at: int) -> tuple[int, int]:
        """Start and end of the first marker. If there is none, twice the place from which the text
        may be the beginning of one."""
        if found := self._find(text, at):
            return found.span()
        at = max(at, len(text) - self._reach)
        while found := self._begins(text, at):
            at = found.start()
            if text[at:] in self._heads:
                return at, at
            at += 1
        return len(text), len(text)


class ToolReader(ABC):
    """A parser of one output; a format says in ``_read`` how its calls are written.

    White space before the first call, between calls and after the last one separates them and is
    no content; beside other text it is.
    """

    kept_markers: tuple[str, ...] = ()  # may be special tokens, whose text must be kept

    def __init__(self, functions: KnownFunctions | None = None) -> None:
        self._functions = functions  # None: any name is one
        self._text = ""
        self._at = 0  # of the next character in _text
        self._marker = 0  # length of the one that read_until found
        self._ended = False
        self._record: list[str] = []  # read, and not certain
        self._space: list[str] = []  # white space that may separate calls
        self._said = False  # content since the beginning or the last call
        self._content: list[str] = []
        self._calls: list[ToolCallDelta] = []
        self._count = 0  # calls so far
        self._open = False  # a call has begun
        self._name = ""  # of that call, until it is in a delta
        self._arguments: list[str] = []
        self._reading = self._read()

    @abstractmethod
    def _read(self) -> Reading[None]:
        """Read the whole output."""

    def push(self, text: str) -> ParsedOutput:
        self._text = self._text[self._at :] + text
        self._at = 0
        next(self._reading, None)
        return self._collect()

    def finish(self) -> ParsedOutput:
        self._ended = True
        opened = self._open
        next(self._reading, None)
        if not self._count:
            self._content += self._space
        parsed = self._collect()
        # A part of the closing marker ends the arguments too, in some formats.
        whole = bool(parsed.calls) and parsed.calls[-1].arguments == "}"
        if opened and not whole:
            return ParsedOutput(parsed.content, parsed.reasoning, parsed.calls, cut=True)
        return parsed

    def _collect(self) -> ParsedOutput:
        self._flush()
        if not self._content and not self._calls:
            return NOTHING
        parsed = ParsedOutput("".join(self._content), "", tuple(self._calls))
        self._content.clear()
        self._calls.clear()
        return parsed

    # Reading

    def peek(self) -> Reading[str]:
        """The next character, which stays unread; "" at the end of the output."""
        while self._at == len(self._text):
            if self._ended:
                return ""
            yield
        return self._text[self._at]

    def take(self, count: int = 1) -> str:
        """Read what is there."""
        text = self._text[self._at : self._at + count]
        self._at += len(text)
        self._record.append(text)
        return text

    def take_run(self, pattern: re.Pattern[str]) -> str:
        """Read as much of what is there as the pattern matches."""
        found = pattern.match(self._text, self._at)
        return self.take(found.end() - self._at) if found else ""

    def skip_space(self) -> Reading[str]:
        """Read white space, and peek."""
        while (yield from self.peek()) and self.take_run(_SPACE):
            pass
        return (yield from self.peek())

    def choose(self, *literals: str) -> Reading[str]:
        """Read the one of these that stands here; "", and nothing is read, if none does."""
        read = ""
        while read not in literals:
            candidate = read + (yield from self.peek())
            if candidate == read or not any(one.startswith(candidate) for one in literals):
                self.unread(read)
                return ""
            read += self.take()
        return read

    def expect(self, literal: str) -> Reading[bool]:
        return bool((yield from self.choose(literal)))

    def unread(self, read: str) -> None:
        """Undo the latest takes, which gave these characters one by one."""
        if not read:
            return
        del self._record[-len(read) :]
        if self._at >= len(read):
            self._at -= len(read)
        else:  # they came with earlier pushes
            self._text = read + self._text[self._at :]
            self._at = 0

    def read_name(self) -> Reading[str]:
        """The longest name that stands here; "" if there is none, or one that is too long."""
        parts: list[str] = []
        length = 0
        while length <= NAME_CHARACTERS and (yield from self.peek()):
            part = self.take_run(NAME)
            if not part:
                return "".join(parts)
            parts.append(part)
            length += len(part)
        return "".join(parts) if length <= NAME_CHARACTERS else ""

    def read_content(self, markers: Markers) -> Reading[str]:
        """Pass content on up to the first marker, and read that; "" at the end of the output."""
        if (yield from self.read_until(markers, self.say)):
            return self.take(self._marker)
        return ""

    def read_until(self, markers: Markers, pass_on: Callable[[str], None]) -> Reading[bool]:
        """Pass on what stands before the first marker, which stays unread. False if there is none:
        all that follows was passed on."""
        while True:
            start, end = markers.find(self._text, self._at)
            if self._ended and start == end:
                start = end = len(self._text)
            if self._at < start:
                pass_on(self._text[self._at : start])
            self._at = start
            self._marker = end - start
            if self._marker:
                return True
            if self._ended:
                return False
            yield

    def read_rest(self) -> Reading[None]:
        """Pass all that follows on as content."""
        while (yield from self.peek()):
            self.say(self._text[self._at :])
            self._at = len(self._text)

    def close(self, *markers: str) -> Reading[bool]:
        """Read the markers that end a call, with white space before each. The output may end inside
        of them. What does not fit is content."""
        for marker in markers:
            yield from self.skip_space()
            if not (yield from self.expect(marker)) and self.take_cut(marker) is None:
                self.reject()
                return False
        self.accept()
        return True

    def take_cut(self, marker: str) -> str | None:
        """Read what the output has of this marker, if it ended inside or before. Else None."""
        if self._ended and marker.startswith(self._text[self._at :]):
            return self.take(len(marker))
        return None

    # What is certain

    def say(self, text: str) -> None:
        """Content."""
        if not text:
            return
        if self._said:
            self._content.append(text)
        elif text.isspace():
            self._space.append(text)
        else:
            self._content += [*self._space, text]
            self._space.clear()
            self._said = True

    def reject(self) -> None:
        """What was read and not accepted is content."""
        self.say("".join(self._record))
        self._record.clear()

    def accept(self) -> None:
        """What was read is the syntax of a call, or a part of one that was written."""
        self._record.clear()

    def knows(self, name: str) -> bool:
        return bool(name) and (self._functions is None or name in self._functions)

    def begin(self, name: str) -> None:
        """What was read is a call, with the arguments that were written. Again: still the same."""
        self.accept()
        if not self._open:
            self._open, self._name = True, name
            self._space.clear()
            self._said = False

    def write(self, text: str) -> None:
        """A piece of the arguments; until the call begins, it stays in the record too."""
        self._arguments.append(text)
        if self._open:
            self._record.clear()

    def end(self) -> None:
        """The call is over, or was none: nothing more is written to it."""
        self._flush()
        if self._open:
            self._count += 1
        self._open = False
        self._arguments.clear()

    def _flush(self) -> None:
        if self._open and (self._name or self._arguments):
            delta = ToolCallDelta(self._count, self._name, "".join(self._arguments))
            self._calls.append(delta)
            self._name = ""
            self._arguments.clear()
