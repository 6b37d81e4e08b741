"""Arguments that are written as text between tags: strings as they are, other values as JSON.

Only the function's schema can tell the string "1" from the number. Values of parameters that take
nothing but strings are passed on as they arrive; another value is withheld until it is whole.
"""

from __future__ import annotations

import json

import msgspec

from triptych.parsers.json_arguments import escape
from triptych.parsers.reader import Markers, Reading, ToolReader

_WORDS = {"True": "true", "False": "false", "None": "null"}  # as some templates write them


class TaggedReader(ToolReader):
    def write_key(self, name: str, key: str, first: bool) -> None:
        """The call is certain, and its next parameter."""
        self.begin(name)
        self.write(f"{'{' if first else ', '}{json.dumps(key, ensure_ascii=False)}: ")

    def copy_text(self, name: str, key: str, end: Markers) -> Reading[bool]:
        """Read a value up to its end, and write it. False if the output ended inside of it."""
        if self._functions is not None and key in self._functions[name]:
            self.write('"')
            whole = yield from self.read_until(end, lambda text: self.write(escape(text)))
            if whole:
                self.write('"')
            return whole
        parts: list[str] = []
        whole = yield from self.read_until(end, parts.append)
        text = "".join(parts)
        self.write(to_json(text) if whole else f'"{escape(text)}')
        return whole


def to_json(text: str) -> str:
    """The text itself if it is JSON, else a JSON string."""
    stripped = text.strip()
    if stripped in _WORDS:
        return _WORDS[stripped]
    try:
        msgspec.json.decode(stripped)
    except (msgspec.MsgspecError, UnicodeEncodeError, RecursionError):
        return f'"{escape(text)}"'
    return stripped
