"""Which hops a request takes through a topology. Pure: the same work and topology, the same plan.

Every skip is decided here and nowhere else.
"""

from __future__ import annotations

from functools import lru_cache

from msgspec import Struct

from triptych.messages import Work
from triptych.topology import Role, Topology


class Hop(Struct, frozen=True):
    """One visit to a worker of a role."""

    role: Role
    items: tuple[int, ...] = ()  # the media items that are encoded on this visit


Step = tuple[Hop, ...]  # hops that run side by side


def plan(work: Work, topology: Topology) -> tuple[Step, ...]:
    """The steps in order. A role that only encodes is visited once for each media item."""
    return _steps(topology, len(work.media))


@lru_cache(maxsize=1024)  # few topologies and few counts: every request finds its plan made
def _steps(topology: Topology, media: int) -> tuple[Step, ...]:
    items = tuple(range(media))
    steps = (_step(role, items) for role in topology.roles)
    return tuple(step for step in steps if step)


def _step(role: Role, items: tuple[int, ...]) -> Step:
    if not role.span:
        return tuple(Hop(role, (item,)) for item in items)
    return (Hop(role, items if role.encodes else ()),)
