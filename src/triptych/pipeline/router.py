"""Policies that choose one of several ready workers by load or by media. Knows no connections.

A media item has an order of workers (rendezvous hashing over a digest of its bytes): it goes to the
first that is not overloaded. All frontends compute the same order without remembering anything, and
a worker that joins or leaves moves only its own share of the media.
"""

from __future__ import annotations

import hashlib
import itertools
import math
import random
from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar

from triptych.messages import MediaItem

SAMPLES, SAMPLE_BYTES = 16, 256  # of a file: enough to tell files apart for routing
MAX_LOAD = 1.5  # times the average load; above it a worker's media go to the next in order

MEDIA_AFFINITY_ROUTINGS = ("least-loaded", "kv")  # the others treat media hops like any hop


class NamedWorker(Protocol):
    @property
    def name(self) -> str: ...


class RoutableWorker(NamedWorker, Protocol):
    @property
    def load(self) -> int:
        """Calls that this frontend has open to the worker."""


N = TypeVar("N", bound=NamedWorker)
W = TypeVar("W", bound=RoutableWorker)
RoutingPolicy = Callable[[Sequence[W]], W]


def round_robin() -> RoutingPolicy[W]:
    turn = itertools.count()
    return lambda workers: workers[next(turn) % len(workers)]


def at_random() -> RoutingPolicy[W]:
    return random.choice


def least_loaded() -> RoutingPolicy[W]:
    """The worker with the fewest open calls; round robin among equals."""
    turn = itertools.count()

    def choose(workers: Sequence[W]) -> W:
        start = next(turn) % len(workers)
        return min((*workers[start:], *workers[:start]), key=lambda worker: worker.load)

    return choose


def by_media_affinity(workers: Sequence[W], item: MediaItem) -> W:
    """The first worker in the item's order that is not overloaded."""
    limit = math.ceil(MAX_LOAD * (sum(worker.load for worker in workers) + 1) / len(workers))
    return next(worker for worker in rendezvous_order(workers, item) if worker.load < limit)


def rendezvous_order(workers: Sequence[N], item: MediaItem) -> list[N]:
    """The workers in the order in which this item prefers them."""
    digest = sample_digest(item)

    def rank(worker: N) -> bytes:
        return hashlib.blake2b(digest + worker.name.encode(), digest_size=8).digest()

    return sorted(workers, key=rank)


def sample_digest(item: MediaItem) -> bytes:
    """A cheap digest of an item: its media key if known, else its size and samples of its bytes.

    Its options count too, since they change what it becomes. Two items with one digest cost a
    cache hit at most.
    """
    if item.prepared is not None:
        return item.prepared.meta.key
    size, view = len(item.data), memoryview(item.data)
    digest = hashlib.blake2b(
        f"{item.kind} {item.form} {item.options} {size}".encode(), digest_size=16
    )
    last = max(0, size - SAMPLE_BYTES)
    for number in range(SAMPLES):  # the first is the head, the last the tail
        start = last * number // (SAMPLES - 1)
        digest.update(view[start : start + SAMPLE_BYTES])
    return digest.digest()


ROUTINGS: dict[str, Callable[[], RoutingPolicy[RoutableWorker]]] = {
    "round-robin": round_robin,
    "random": at_random,
    "least-loaded": least_loaded,
    "kv": least_loaded,  # of hops without prefill; ``kv.routing`` chooses for those with it
}
