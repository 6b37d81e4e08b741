"""The guard's own parts, without an engine around."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

from triptych.engines.vllm.scheduler import REMEMBERED_STEPS, GuardedScheduler


def block(number: int, found_by: str | None) -> SimpleNamespace:
    return SimpleNamespace(block_id=number, block_hash=found_by)


class Cache:
    """As much of vLLM's as the guard asks."""

    def __init__(self, *hashes: str | None) -> None:
        self.block_pool = SimpleNamespace(blocks=[block(n, one) for n, one in enumerate(hashes)])
        self.evicted: set[int] = set()

    def get_block_ids(self, request_id: str) -> tuple[list[int]]:
        return ([1, 2],)

    def evict_blocks(self, ids: set[int]) -> None:
        self.evicted |= ids


def guarded(**parts: Any) -> Any:
    guard = GuardedScheduler.__new__(GuardedScheduler)
    guard.__dict__.update(parts)
    return guard


def test_a_lease_is_ended_again_until_the_blocks_are_gone():
    connector = SimpleNamespace(_reqs_need_send={})
    guard = guarded(
        _unread={"one", "two"},
        requests={"one": None, "two": None},
        connector=SimpleNamespace(connector_scheduler=connector),
    )
    for left in ({"one", "two"}, {"two"}, set()):
        guard.requests = dict.fromkeys(left)
        connector._reqs_need_send = {}  # as with every step
        guard._end_leases()
        assert connector._reqs_need_send.keys() == left
        assert all(end < time.perf_counter() for end in connector._reqs_need_send.values())
    assert not guard._unread


def test_of_a_request_that_has_ended_blocks_are_forgotten_unless_they_are_anothers_now():
    cache = Cache(None, "a", "b")
    ended = SimpleNamespace(request_id="one", mm_features=[SimpleNamespace(identifier="picture")])
    guard = guarded(requests={"one": ended}, _finished={}, kv_cache_manager=cache)
    guard._finished["one"] = guard._cached_content("one")
    guard.requests.clear()
    cache.block_pool.blocks[2].block_hash = "c"
    content = guard._cached_content("one")
    guard._evict_blocks(content)
    assert cache.evicted == {1}
    assert content.media == ("picture",)
    assert guard._cached_content("one").blocks == ()  # once


def test_only_the_last_to_end_are_remembered(monkeypatch):
    monkeypatch.setattr(
        GuardedScheduler.__mro__[1], "_free_request", lambda self, request: (None, None)
    )
    guard = guarded(requests={}, _finished={}, kv_cache_manager=Cache(None, "a", "b"))
    guard.max_num_running_reqs = 2
    for number in range(20):
        one = SimpleNamespace(request_id=str(number), borrowed=number % 2, mm_features=[])
        guard.requests = {one.request_id: one}
        guard._free_request(one)
    assert list(guard._finished) == [str(n) for n in range(20) if n % 2][-2 * REMEMBERED_STEPS :]
