"""Which roles a request calls, in which order. Pure: it looks at no worker and at no clock.

Every step that a request can leave out is decided here.
"""

from __future__ import annotations

from functools import lru_cache

from msgspec import Struct

from triptych.messages import Work
from triptych.topology import Role, Topology


class Hop(Struct, frozen=True):
    """One call to a worker of a role."""

    role: Role
    items: tuple[int, ...] = ()  # media items that the worker encodes in this call
    from_cache: bool = False  # a decode worker that also prefills, from its own prefix cache


Plan = tuple[tuple[Hop, ...], ...]  # steps in order; the hops of a step run at the same time


def plan(work: Work, topology: Topology, from_cache: bool = False) -> Plan:
    """The steps of a request. A role that only encodes gets one hop per media item.

    ``from_cache``: a decode worker has nearly all of the prompt in its prefix cache. Where decode
    is a role of its own, that worker prefills the rest and is the only one called.
    """
    return _plan(topology, len(work.media), from_cache and topology.roles[-1].phases == "D")


@lru_cache(maxsize=1024)  # few topologies and few counts of media: nearly every call hits
def _plan(topology: Topology, media: int, from_cache: bool) -> Plan:
    if from_cache:
        return ((Hop(topology.roles[-1], from_cache=True),),)
    steps = (_step(role, tuple(range(media))) for role in topology.roles)
    return tuple(step for step in steps if step)


def _step(role: Role, items: tuple[int, ...]) -> tuple[Hop, ...]:
    if not role.phases:
        return tuple(Hop(role, (item,)) for item in items)
    return (Hop(role, items if role.encodes else ()),)
