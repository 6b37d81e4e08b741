"""Documents as YAML: maps, lists, strings, whole numbers and booleans in block style, no more.

A string that YAML could take for something else is written as JSON, which YAML reads as well; one
of several lines stands as they are.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from typing import Any

# A letter first, so neither a number nor a date; no ": " and no " #", which end a plain string.
_PLAIN = re.compile(r"[A-Za-z/][A-Za-z0-9_./@-]*(:[A-Za-z0-9_./@-]+)*")
_FILE = re.compile(r"([!-~]([ -~]*[!-~])?\n)([ -~]*[!-~]\n)+")  # begins and ends as YAML keeps it
_FOREIGN = re.compile(r"[^\x20-\x7e]")  # in YAML's escapes: JSON's are of halves of characters
_TAKEN = {"null", "true", "false", "yes", "no", "on", "off", "y", "n"}  # some readers are old


def dump(documents: Iterable[dict[str, Any]]) -> str:
    """The documents, one after the other."""
    return "---\n".join("".join(f"{line}\n" for line in _map(document)) for document in documents)


def _map(value: dict[str, Any]) -> Iterator[str]:
    for key, inner in value.items():
        name = _scalar(key)
        if isinstance(inner, str) and _FILE.fullmatch(inner):
            yield f"{name}: |"
            yield from (f"  {line}" for line in inner.splitlines())
            continue
        if not isinstance(inner, dict | list) or not inner:
            yield f"{name}: {_scalar(inner)}"
            continue
        yield f"{name}:"
        yield from (f"  {line}" for line in _lines(inner))


def _list(value: list[Any]) -> Iterator[str]:
    for inner in value:
        if not isinstance(inner, dict | list) or not inner:
            yield f"- {_scalar(inner)}"
            continue
        first, *rest = _lines(inner)
        yield f"- {first}"
        yield from (f"  {line}" for line in rest)


def _lines(value: dict[str, Any] | list[Any]) -> Iterator[str]:
    return _map(value) if isinstance(value, dict) else _list(value)


def _scalar(value: Any) -> str:
    """Also an empty map or list."""
    if isinstance(value, str) and _PLAIN.fullmatch(value) and value.lower() not in _TAKEN:
        return value
    text = json.dumps(value, ensure_ascii=False)
    return _FOREIGN.sub(lambda found: f"\\U{ord(found[0]):08x}", text)
