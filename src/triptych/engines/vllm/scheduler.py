"""vLLM's scheduler, which runs in the engine's process, and what guards it.

- The tower is never run on an item that has nothing to encode: identity and grid only, because its
  KV cache or embedding was to come from elsewhere. vLLM would do so when such a request was
  preempted or what was to come is gone, and die of it. Here that request alone ends, in an error.
- Such a request is bare: it can't be computed again. So it is let in only where there is room to go
  on for a while, and is the last to be preempted.
- The abort of a request that has ended already, but whose blocks wait for a reader, frees them now
  and not when their lease ends, even if the reader would have it go on.
- The abort of an id that is marked ``STALE`` takes what was computed out of the caches first, also
  where that request has just ended: its first token may have been its last.
- The engine ends when the worker that started it is gone, however that ended.

It leans on the inside of vLLM; tests/vllm holds it to the version that is installed.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import select
import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import Request, RequestStatus

from triptych.engines.adapter.leftovers import EngineProcesses
from triptych.engines.vllm.connector import EMBEDDING_FIELD
from triptych.engines.vllm.guard import STALE_PREFIX

EncoderSchedule = tuple[
    list[int], int, int, list[int], list[int]
]  # first: the items to run the tower on
HEADROOM_TOKENS = (
    256  # tokens that every bare request must have room for when another one is let in
)
REMEMBERED_STEPS = (
    4  # in which every place may end a request: so many that have ended are remembered
)


@dataclass(frozen=True, slots=True)
class CachedContent:
    """What a request has left in the caches."""

    blocks: tuple[tuple[int, Any], ...]  # ids, and the hashes by which they are found
    media: tuple[str, ...]


class GuardedScheduler(Scheduler):  # type: ignore[misc]
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._unread: set[str] = set()  # that have ended, and whose blocks nobody is to read
        self._ended: dict[
            str, CachedContent
        ] = {}  # of borrowed inputs; the last to end stands last
        self._full = -1  # the step in which there was no room for another bare request
        threading.Thread(target=end_with_parent, name="end-with-parent", daemon=True).start()

    def add_request(self, request: Request) -> None:
        request.bare = any(not has_content(item.data) for item in request.mm_features)
        request.borrowed = is_borrowed(request)
        super().add_request(request)

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        self.running.sort(key=lambda request: not request.bare)  # the last one is preempted first
        self._end_leases()
        return super().schedule(*args, **kwargs)

    def _handle_blocked_waiting_request(self, request: Request) -> bool:
        """Whether a waiting request may be scheduled now."""
        if not super()._handle_blocked_waiting_request(request):
            return False
        holds_blocks = request.num_computed_tokens > 0  # and gives none back by waiting
        return not request.bare or holds_blocks or self._has_room(request)

    def _has_room(self, request: Request) -> bool:
        if self._full == self.current_step:
            return False
        loading = self._inflight_prefills  # let in, and in no queue before this step is done
        going = {r for r in (*self.running, *self.kv_holding_waiting, *loading) if r.bare}
        needed = -(-request.num_tokens // self.block_size)
        needed += sum(self._growth(r) for r in (*going, request))
        if not going or needed <= self.kv_cache_manager.block_pool.get_num_free_blocks():
            return True
        self._full = self.current_step
        return False

    def _growth(self, request: Request) -> int:
        """Blocks that a request will want soon."""
        left: int = request.num_prompt_tokens + request.max_tokens - request.num_tokens
        return -(-min(HEADROOM_TOKENS, left) // int(self.block_size))

    def _try_schedule_encoder_inputs(
        self,
        request: Request,
        num_computed_tokens: int,
        num_new_tokens: int,
        encoder_compute_budget: int,
        *args: Any,
        **kwargs: Any,
    ) -> EncoderSchedule:
        plan: EncoderSchedule = super()._try_schedule_encoder_inputs(
            request, num_computed_tokens, num_new_tokens, encoder_compute_budget, *args, **kwargs
        )
        if all(has_content(request.mm_features[index].data) for index in plan[0]):
            return plan
        # vLLM's own way to end one request whose media can't be right: with the step's outputs.
        self.encoder_cache_mismatch_reqs.add(request.request_id)
        return [], 0, encoder_compute_budget, [], []

    def finish_requests(
        self, request_ids: str | Iterable[str] | None, finished_status: RequestStatus
    ) -> list[Request]:
        if request_ids is None:
            return list(super().finish_requests(None, finished_status))
        ids = [request_ids] if isinstance(request_ids, str) else list(request_ids)
        stale = [name.removeprefix(STALE_PREFIX) for name in ids if name.startswith(STALE_PREFIX)]
        remains = [self._remains(name) for name in stale]
        for one in remains:
            self._forget_blocks(one)
        ids = [name for name in ids if not name.startswith(STALE_PREFIX)] + stale
        done: list[Request] = super().finish_requests(ids, finished_status)
        for one in remains:
            self._forget_media(one)
        self._unread.update(name for name in ids if self._is_held(name))
        return done

    def _free_request(self, request: Request, *args: Any, **kwargs: Any) -> Any:
        if request.borrowed:
            self._ended[request.request_id] = self._remains(request.request_id)
            if len(self._ended) > REMEMBERED_STEPS * self.max_num_running_reqs:
                del self._ended[next(iter(self._ended))]
        return super()._free_request(request, *args, **kwargs)

    def _is_held(self, request_id: str) -> bool:
        """Whether it has ended, and its blocks wait for a reader."""
        request = self.requests.get(request_id)
        if request is None or not request.is_finished():
            return False
        return bool((request.kv_transfer_params or {}).get("do_remote_decode"))

    def _end_leases(self) -> None:
        """The connector then frees the blocks in this step, unless it hears first that they were
        read. In every step until they are gone: a reader that still waits lengthens the lease, and
        may be heard in the very step that was to end it."""
        self._unread.intersection_update(self.requests)
        for request_id in self._unread:
            leases = self.connector.connector_scheduler._reqs_need_send
            leases[request_id] = time.perf_counter() - 1.0

    def _remains(self, request_id: str) -> CachedContent:
        """Of a request that is here, or was a moment ago."""
        request = self.requests.get(request_id)
        if request is None:
            return self._ended.pop(request_id, CachedContent((), ()))
        groups = self.kv_cache_manager.get_block_ids(request_id)
        blocks = [self.kv_cache_manager.block_pool.blocks[id] for group in groups for id in group]
        return CachedContent(
            tuple((block.block_id, block.block_hash) for block in blocks),
            tuple(feature.identifier for feature in request.mm_features),
        )

    def _forget_blocks(self, remains: CachedContent) -> None:
        """But not those that have become another's since."""
        blocks = self.kv_cache_manager.block_pool.blocks
        same = {id for id, found_by in remains.blocks if blocks[id].block_hash == found_by}
        self.kv_cache_manager.evict_blocks(same)

    def _forget_media(self, remains: CachedContent) -> None:
        """Evict its embeddings, as the cache itself would for want of room; but not those that
        others use now."""
        cache = self.encoder_cache_manager
        for identifier in remains.media:
            if (size := cache.freeable.pop(identifier, None)) is not None:
                del cache.cached[identifier]
                del cache.num_embeds_by_hash[identifier]
                cache.freed.append(identifier)
                cache.num_free_slots += size


def end_with_parent() -> None:
    """Kill this process and those that it started once the one is gone that started it.

    vLLM's engine would stay, with all its memory, when its worker is killed; and its own workers
    take long to notice.
    """
    parent = multiprocessing.parent_process()
    if parent is None or parent.pid is None:
        return  # the engine runs within the worker
    with contextlib.suppress(ProcessLookupError):
        descriptor = os.pidfd_open(parent.pid)
        if os.getppid() == parent.pid:  # else its id is another's by now
            select.select([descriptor], [], [])
    EngineProcesses([os.getpid()]).clear()  # this process included


def is_borrowed(request: Request) -> bool:
    """Whether it comes with what may turn out to be stale: another's KV cache, or embeddings."""
    if (request.kv_transfer_params or {}).get("do_remote_prefill"):
        return True
    return any(
        item.data is not None and EMBEDDING_FIELD in item.data for item in request.mm_features
    )


def has_content(data: Any) -> bool:
    """Whether an item holds pixels, a spectrum or an embedding: a tensor of two dimensions or more.
    Grids, lengths and times are vectors and numbers."""
    return data is not None and any(_large(value) for value in data.get_data().values())


def _large(value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        return value.ndim > 1
    return isinstance(value, list | tuple) and any(_large(part) for part in value)


class GuardedAsyncScheduler(GuardedScheduler, AsyncScheduler):  # type: ignore[misc]
    """The same where a step is scheduled while the one before still runs."""
