"""How one of several ready workers is chosen. Knows loads and media, not connections or caches.

A hop that encodes goes where its media were encoded before, as long as that worker is not busier
than it should be. Nobody remembers anything for that: the bytes of a media item rank the workers
(rendezvous hashing), so that all frontends agree and a worker that comes or goes moves only its own
share.
"""

from __future__ import annotations

import hashlib
import itertools
import math
import random
from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar

from triptych.messages import MediaItem

SAMPLES, SAMPLE_BYTES = 16, 256  # of a file: what tells it from another for routing
SLACK = 1.5  # times the average load that a worker may have before its media go elsewhere


MEDIA_AFFINITY_ROUTINGS = ("least-loaded", "kv")  # under the others media take turns like all else


class Named(Protocol):
    @property
    def name(self) -> str: ...


class Loaded(Named, Protocol):
    @property
    def load(self) -> int:
        """Calls that are open to this worker now."""


N = TypeVar("N", bound=Named)
P = TypeVar("P", bound=Loaded)
RoutingPolicy = Callable[[Sequence[P]], P]


def round_robin() -> RoutingPolicy[P]:
    turn = itertools.count()
    return lambda peers: peers[next(turn) % len(peers)]


def at_random() -> RoutingPolicy[P]:
    return random.choice


def least_loaded() -> RoutingPolicy[P]:
    """The worker with the fewest open calls; among equals they take turns."""
    turn = itertools.count()

    def choose(peers: Sequence[P]) -> P:
        start = next(turn) % len(peers)
        return min((*peers[start:], *peers[:start]), key=lambda peer: peer.load)

    return choose


def by_media_affinity(peers: Sequence[P], item: MediaItem) -> P:
    """The worker that this media item belongs to, or the next in its order that is not too busy."""
    most = math.ceil(SLACK * (sum(peer.load for peer in peers) + 1) / len(peers))
    return next(peer for peer in rendezvous_order(peers, item) if peer.load < most)


def rendezvous_order(peers: Sequence[N], item: MediaItem) -> list[N]:
    """In the order in which this media item belongs to them."""
    mark = sample_digest(item)

    def rank(peer: N) -> bytes:
        return hashlib.blake2b(mark + peer.name.encode(), digest_size=8).digest()

    return sorted(peers, key=rank)


def sample_digest(item: MediaItem) -> bytes:
    """What media are told apart by for routing: cheap, since a mistake costs a cache hit at most.

    Their size and samples of their bytes; the media key where it is known already.
    """
    if item.prepared is not None:
        return item.prepared.meta.key
    size, view = len(item.data), memoryview(item.data)
    digest = hashlib.blake2b(f"{item.kind} {item.form} {size}".encode(), digest_size=16)
    last = max(0, size - SAMPLE_BYTES)
    for number in range(SAMPLES):  # the first is the head, the last the tail
        start = last * number // (SAMPLES - 1)
        digest.update(view[start : start + SAMPLE_BYTES])
    return digest.digest()


ROUTINGS: dict[str, Callable[[], RoutingPolicy[Loaded]]] = {
    "round-robin": round_robin,
    "random": at_random,
    "least-loaded": least_loaded,
    "kv": least_loaded,  # of hops that do not prefill; those that do go by ``kv_routing``
}
