"""Outputs that are JSON from beginning to end, as a grammar holds them."""

from __future__ import annotations

from triptych.parsers.call_object import read_call, read_calls
from triptych.parsers.json_arguments import copy_object
from triptych.parsers.reader import Reading, ToolReader


class PlainParser(ToolReader):
    """One object, or an array of objects, with name and arguments (or parameters)."""

    def _read(self) -> Reading[None]:
        if (yield from self.skip_space()) == "[":
            yield from read_calls(self)
        else:
            yield from read_call(self)
        yield from self._read_after()

    def _read_after(self) -> Reading[None]:
        self.reject()
        yield from self.read_rest()


class HeldParser(PlainParser):
    """A grammar holds the output: where it ends before a call, what it has of the call's syntax is
    no content."""

    def _read_after(self) -> Reading[None]:
        if not self._ended:
            yield from super()._read_after()


class ArgumentsParser(ToolReader):
    """The output is the arguments of a function that is known beforehand."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self._function = name

    def _read(self) -> Reading[None]:
        if (yield from self.skip_space()) == "{":
            self.begin(self._function)
            yield from copy_object(self)
            self.end()
        elif self._ended:  # before the arguments
            return
        self.reject()
        yield from self.read_rest()
