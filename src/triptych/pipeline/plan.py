"""Which hops a request takes through a topology. Pure: the same work, topology and facts, the same
plan.

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
    alone: bool = False  # it prefills too, from its own cache: nobody is visited before it


Step = tuple[Hop, ...]  # hops that run side by side


class CacheFacts(Struct, frozen=True):
    """What is known of caches when a request begins."""

    left: int | None = None  # tokens that the worker of role D that had best decode would have to
    # prefill, but for the last block, which everybody must; None: too many, or nobody knows
    most: int = 0  # such tokens that it may be given


NO_FACTS = CacheFacts()


def plan(work: Work, topology: Topology, facts: CacheFacts = NO_FACTS) -> tuple[Step, ...]:
    """The steps in order. A role that only encodes is visited once for each media item. Where
    whoever decodes can do the rest of the prefill itself, nobody else is visited."""
    alone = facts.left is not None and facts.left <= facts.most
    return _steps(topology, len(work.media), alone and topology.roles[-1].span == "D")


@lru_cache(maxsize=1024)  # few topologies and few counts: every request finds its plan made
def _steps(topology: Topology, media: int, alone: bool) -> tuple[Step, ...]:
    if alone:
        return ((Hop(topology.roles[-1], alone=True),),)
    items = tuple(range(media))
    steps = (_step(role, items) for role in topology.roles)
    return tuple(step for step in steps if step)


def _step(role: Role, items: tuple[int, ...]) -> Step:
    if not role.span:
        return tuple(Hop(role, (item,)) for item in items)
    return (Hop(role, items if role.encodes else ()),)
