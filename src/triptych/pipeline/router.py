"""How one of several ready workers is chosen. Knows loads, not connections."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar


class Loaded(Protocol):
    @property
    def load(self) -> int:
        """Calls that are open to this worker now."""


P = TypeVar("P", bound=Loaded)
Choose = Callable[[Sequence[P]], P]


def round_robin() -> Choose[P]:
    turn = itertools.count()
    return lambda peers: peers[next(turn) % len(peers)]


def at_random() -> Choose[P]:
    return random.choice


def least_loaded() -> Choose[P]:
    """The worker with the fewest open calls; among equals they take turns."""
    turn = itertools.count()

    def choose(peers: Sequence[P]) -> P:
        start = next(turn) % len(peers)
        return min((*peers[start:], *peers[:start]), key=lambda peer: peer.load)

    return choose


ROUTINGS: dict[str, Callable[[], Choose[Loaded]]] = {
    "round-robin": round_robin,
    "random": at_random,
    "least-loaded": least_loaded,
}
