"""Stage, Role, Topology: which stages share a process, and how many workers of each role there are.

``Topology.parse("E*2/P/D*3")`` refuses a pattern that cannot be served, with the reason; nothing
checks it again later. This module knows no workers and no addresses.
"""

from __future__ import annotations

import enum
import re

from msgspec import Struct

from triptych.errors import InvalidPattern

MAX_WORKERS = 256
_PART = re.compile(r"([A-Z]+)(?:\*(\d{1,4}))?")


class Stage(enum.StrEnum):
    ENCODE = "E"
    PREFILL = "P"
    DECODE = "D"


ORDER = "".join(Stage)  # "EPD": every request runs them in this order


class Role(str):
    """The stages of one worker, written in order: ``E``, ``EP``, ``PD``, ``EPD`` ..."""

    __slots__ = ()

    @property
    def phases(self) -> str:
        """The stages that the language engine runs in this role: ``P``, ``D``, ``PD`` or none."""
        return self.replace(Stage.ENCODE, "")

    @property
    def encodes(self) -> bool:
        return Stage.ENCODE in self


class Group(Struct, frozen=True):
    """Workers of one role."""

    role: Role
    count: int


class Topology(Struct, frozen=True):
    """Roles with their counts; together they cover encode, prefill and decode."""

    groups: tuple[Group, ...]

    @classmethod
    def parse(cls, pattern: str) -> Topology:
        groups = tuple(_group(pattern, part) for part in pattern.split("/"))
        stages = "".join(group.role for group in groups)
        if stages != ORDER:
            raise InvalidPattern(pattern, _why(stages))
        if (total := sum(group.count for group in groups)) > MAX_WORKERS:
            raise InvalidPattern(pattern, f"{total} workers are more than {MAX_WORKERS}")
        return cls(groups)

    @property
    def roles(self) -> tuple[Role, ...]:
        return tuple(group.role for group in self.groups)

    @property
    def workers(self) -> list[tuple[Role, int]]:
        """Every worker, by its role and its index."""
        return [(group.role, index) for group in self.groups for index in range(group.count)]

    def __str__(self) -> str:
        return "/".join(g.role if g.count == 1 else f"{g.role}*{g.count}" for g in self.groups)


def _group(pattern: str, part: str) -> Group:
    match = _PART.fullmatch(part)
    if match is None:
        raise InvalidPattern(pattern, f"'{part}' is not a role such as 'E', 'PD' or 'D*3'")
    count = int(match[2] or 1)
    if count < 1:
        raise InvalidPattern(pattern, f"'{part}' asks for no worker at all")
    return Group(Role(match[1]), count)


def _why(stages: str) -> str:
    for letter in stages:
        if letter not in ORDER:
            return f"'{letter}' is not a stage; the stages are E, P and D"
        if stages.count(letter) > 1:
            return f"{letter} stands in it twice"
    if missing := [letter for letter in ORDER if letter not in stages]:
        return f"{' and '.join(missing)} is missing"
    return "a request goes from E to P to D, so they must stand in that order"
