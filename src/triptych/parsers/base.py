"""What a parser of model output makes of it, and the interface of all parsers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from msgspec import Struct

# The functions that a request offers: name to the names of those parameters that take only
# strings. Formats that write arguments as bare text need them to tell "1" from 1.
KnownFunctions = Mapping[str, frozenset[str]]


class ToolCallDelta(Struct, frozen=True):
    """A piece of one call. All ``arguments`` of a call joined together are one JSON object."""

    index: int
    name: str = ""  # in the first delta of a call only
    arguments: str = ""


class ParsedOutput(Struct, frozen=True):
    """What became certain with one push."""

    content: str = ""
    reasoning: str = ""
    calls: tuple[ToolCallDelta, ...] = ()
    cut: bool = False  # the output ended inside of a call


NOTHING = ParsedOutput()


class OutputParser(Protocol):
    """Takes the text of one output as it arrives, however it is divided."""

    def push(self, text: str) -> ParsedOutput: ...

    def finish(self) -> ParsedOutput:
        """What was withheld, at the end of the output."""


def string_parameters(schema: Mapping[str, Any]) -> frozenset[str]:
    """Names of the parameters that take only strings, from the JSON schema of a function."""
    properties = schema.get("properties")
    if not isinstance(properties, Mapping):
        return frozenset()
    return frozenset(name for name, one in properties.items() if _takes_strings(one))


def _takes_strings(schema: Any) -> bool:
    if not isinstance(schema, Mapping):
        return False
    choices = schema.get("enum")
    if "type" not in schema and isinstance(choices, list):
        return all(isinstance(choice, str) for choice in choices)
    return schema.get("type") in ("string", ["string"])
