"""The file of ``--keys-file``: API keys with names, limits and expiry, as TOML.

    [[key]]
    name = "alice"
    sha256 = "2bb80d53..."  # or key = "..."
    expires = 2027-01-31T00:00:00Z
    requests_per_minute = 600

Several keys of one name belong to one holder: one tenant, one set of limits.
"""

from __future__ import annotations

import difflib
import hashlib
import re
import tomllib
from collections.abc import Iterator, Sequence
from datetime import UTC, date, datetime
from pathlib import Path
from typing import Annotated, Any

import msgspec
from msgspec import Meta, Struct

from triptych.api.rate_limits import KeyLimits
from triptych.errors import InvalidConfig

_Name = Annotated[str, Meta(pattern="^[A-Za-z0-9][A-Za-z0-9._@-]{0,63}$")]
_Digest = Annotated[str, Meta(pattern="^[0-9a-fA-F]{64}$")]
_Limit = Annotated[int, Meta(ge=1)]


class _KeyTable(Struct, frozen=True, forbid_unknown_fields=True):
    name: _Name
    key: Annotated[str, Meta(min_length=1)] | None = None
    sha256: _Digest | None = None
    expires: Any = None  # a datetime or a date
    requests_per_minute: _Limit | None = None
    tokens_per_minute: _Limit | None = None
    media_bytes_per_minute: _Limit | None = None
    streams: _Limit | None = None


_MEANINGS = {  # what a field must be; the others are limits
    "name": "must be 1 to 64 letters, digits or . _ @ -, and begin with a letter or digit",
    "key": "must be a text that is not empty",
    "sha256": "must be 64 hexadecimal digits, as `sha256sum` prints them",
}
_LIMIT = "must be a whole number of 1 or more"


class NamedKey(Struct, frozen=True):
    """One key of the file."""

    name: str
    digest: bytes  # SHA-256 of the key
    expires: float | None  # Unix time
    limits: KeyLimits


def read_key_file(path: str) -> list[NamedKey]:
    """The keys of the file. Raises InvalidConfig, which quotes no key."""
    try:
        decoded = tomllib.loads(Path(path).read_text())
        keys = [_named_key(entry) for entry in _read_tables(decoded)]
        _check_all(keys)
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidConfig(f"--keys-file {path} cannot be read: {error}") from None
    except tomllib.TOMLDecodeError as error:
        raise InvalidConfig(f"--keys-file {path} is not TOML: {error}") from None
    except ValueError as error:
        raise InvalidConfig(f"--keys-file {path} cannot be used: {error}") from None
    return keys


def _read_tables(decoded: dict[str, Any]) -> Iterator[_KeyTable]:
    for name in sorted(decoded.keys() - {"key"}):
        hint = " Did you mean [[key]]?" if name.rstrip("s") == "key" else ""
        raise ValueError(f"there is no '{name}': it has [[key]] tables alone.{hint}")
    tables = decoded.get("key", [])
    if not isinstance(tables, list) or not all(isinstance(table, dict) for table in tables):
        raise ValueError("'key' is not a list of tables: begin each key with [[key]]")
    for number, table in enumerate(tables, 1):
        try:
            yield msgspec.convert(table, _KeyTable)
        except msgspec.ValidationError as error:
            raise ValueError(f"[[key]] number {number}{_explain(str(error))}") from None


def _explain(message: str) -> str:
    """What is wrong with a table, in words that follow its number. Quotes no value."""
    what, _, place = message.partition(" - at `$.")
    if field := place.rstrip("`"):
        return f": '{field}' {_MEANINGS.get(field, _LIMIT)}"
    [field] = re.findall("`(.*)`", what)
    if "missing" in what:
        return f" has no '{field}'"
    near = difflib.get_close_matches(field, _KeyTable.__struct_fields__, 1)
    hint = f" Did you mean {near[0]}?" if near else ""
    return f" has an unknown name '{field}'.{hint}"


def _named_key(entry: _KeyTable) -> NamedKey:
    if (entry.key is None) == (entry.sha256 is None):
        raise ValueError(f"the key of '{entry.name}' needs either 'key' or 'sha256'")
    if entry.key is not None:
        if entry.key.strip() != entry.key or not entry.key.isprintable():
            raise ValueError(f"the key of '{entry.name}' has spaces around it or unprintable parts")
        digest = hashlib.sha256(entry.key.encode()).digest()
    else:
        digest = bytes.fromhex(entry.sha256 or "")
    limits = KeyLimits(
        entry.requests_per_minute or 0,
        entry.tokens_per_minute or 0,
        entry.media_bytes_per_minute or 0,
        entry.streams or 0,
    )
    expires = None if entry.expires is None else _unix_time(entry.expires, entry.name)
    return NamedKey(entry.name, digest, expires, limits)


def _unix_time(given: Any, name: str) -> float:
    """A date means its beginning; without an offset a time is UTC."""
    if isinstance(given, date) and not isinstance(given, datetime):
        given = datetime(given.year, given.month, given.day)
    if not isinstance(given, datetime):
        raise ValueError(
            f"'expires' of '{name}' is not a date: write it without quotes, as in 2027-01-31 or "
            "2027-01-31T12:00:00Z"
        )
    return (given if given.tzinfo else given.replace(tzinfo=UTC)).timestamp()


def _check_all(keys: Sequence[NamedKey]) -> None:
    if not keys:
        raise ValueError("it has no key. To revoke the last one, let it expire")
    names: dict[bytes, str] = {}
    limits: dict[str, KeyLimits] = {}
    for key in keys:
        other = names.setdefault(key.digest, key.name)
        if other != key.name:
            raise ValueError(f"'{other}' and '{key.name}' have the same key")
        if limits.setdefault(key.name, key.limits) != key.limits:
            raise ValueError(f"the keys of '{key.name}' have different limits: give them the same")
