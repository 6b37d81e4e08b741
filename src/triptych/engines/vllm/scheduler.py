"""vLLM's scheduler with guards, so that no request can end the engine. Runs in its process.

- A *bare* request has an item without pixels and without an embedding, because its KV cache or its
  embedding comes from another worker. vLLM would run the tower on that item after a preemption, or
  when the other worker's data is gone, and the engine would die. Here only that request fails.
- A bare request can't be computed again, so the scheduler admits it only if there is room for it to
  go on for a while, and preempts it last.
- The abort of a finished request whose blocks wait for a peer frees them at once instead of when
  their lease ends, even if the peer extends the lease.
- The abort of an id with ``STALE_PREFIX`` first evicts what was computed from the request's inputs,
  even if the request has just finished: its first token may have been its last.
- The engine ends when the worker that started it has ended, for whatever reason.

It depends on vLLM's internals; tests/vllm checks it against the installed version.
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

from triptych.engines.adapter.processes import EngineProcesses
from triptych.engines.vllm.connector import EMBEDDING_FIELD
from triptych.engines.vllm.extension import STALE_PREFIX

EncoderSchedule = tuple[list[int], int, int, list[int], list[int]]  # first: items to encode
HEADROOM_TOKENS = 256  # free room that every bare request needs when another is admitted
REMEMBERED_STEPS = 4  # whose finished requests are remembered; all slots may finish in a step


@dataclass(frozen=True, slots=True)
class CachedContent:
    """What a request has stored in the caches."""

    blocks: tuple[tuple[int, Any], ...]  # ids and hashes
    media: tuple[str, ...]


class GuardedScheduler(Scheduler):  # type: ignore[misc]
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._unread: set[str] = set()  # finished requests whose blocks no peer will read
        self._finished: dict[str, CachedContent] = {}  # with borrowed inputs; oldest first
        self._full_step = -1  # the last step without room for another bare request
        threading.Thread(target=end_with_parent, name="end-with-parent", daemon=True).start()

    def add_request(self, request: Request) -> None:
        request.bare = any(not has_content(item.data) for item in request.mm_features)
        request.borrowed = is_borrowed(request)
        super().add_request(request)

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        self.running.sort(key=lambda request: not request.bare)  # vLLM preempts the last one first
        self._end_leases()
        return super().schedule(*args, **kwargs)

    def _handle_blocked_waiting_request(self, request: Request) -> bool:
        """Whether a waiting request may be scheduled now."""
        if not super()._handle_blocked_waiting_request(request):
            return False
        holds_blocks = request.num_computed_tokens > 0  # waiting would not free them
        return not request.bare or holds_blocks or self._has_room(request)

    def _has_room(self, request: Request) -> bool:
        if self._full_step == self.current_step:
            return False
        loading = self._inflight_prefills  # admitted, and in no queue until this step is done
        bare = {r for r in (*self.running, *self.kv_holding_waiting, *loading) if r.bare}
        needed = -(-request.num_tokens // self.block_size)
        needed += sum(self._growth(r) for r in (*bare, request))
        if not bare or needed <= self.kv_cache_manager.block_pool.get_num_free_blocks():
            return True
        self._full_step = self.current_step
        return False

    def _growth(self, request: Request) -> int:
        """Blocks that a request will need soon."""
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
        # vLLM then fails this request with the step's outputs, as one with invalid media.
        self.encoder_cache_mismatch_reqs.add(request.request_id)
        return [], 0, encoder_compute_budget, [], []

    def finish_requests(
        self, request_ids: str | Iterable[str] | None, finished_status: RequestStatus
    ) -> list[Request]:
        if request_ids is None:
            return list(super().finish_requests(None, finished_status))
        ids = [request_ids] if isinstance(request_ids, str) else list(request_ids)
        stale = [name.removeprefix(STALE_PREFIX) for name in ids if name.startswith(STALE_PREFIX)]
        contents = [self._cached_content(name) for name in stale]
        for content in contents:
            self._evict_blocks(content)
        ids = [name for name in ids if not name.startswith(STALE_PREFIX)] + stale
        done: list[Request] = super().finish_requests(ids, finished_status)
        for content in contents:
            self._evict_media(content)
        self._unread.update(name for name in ids if self._waits_for_peer(name))
        return done

    def _free_request(self, request: Request, *args: Any, **kwargs: Any) -> Any:
        if request.borrowed:
            self._finished[request.request_id] = self._cached_content(request.request_id)
            if len(self._finished) > REMEMBERED_STEPS * self.max_num_running_reqs:
                del self._finished[next(iter(self._finished))]
        return super()._free_request(request, *args, **kwargs)

    def _waits_for_peer(self, request_id: str) -> bool:
        """Whether it has finished and its blocks wait for a peer."""
        request = self.requests.get(request_id)
        if request is None or not request.is_finished():
            return False
        return bool((request.kv_transfer_params or {}).get("do_remote_decode"))

    def _end_leases(self) -> None:
        """Let the leases of unread blocks end: the connector then frees them in this step.

        Repeated in every step until they are gone, because a waiting peer may extend the lease.
        """
        self._unread.intersection_update(self.requests)
        for request_id in self._unread:
            leases = self.connector.connector_scheduler._reqs_need_send
            leases[request_id] = time.perf_counter() - 1.0

    def _cached_content(self, request_id: str) -> CachedContent:
        """Of a request that is running or has just finished."""
        request = self.requests.get(request_id)
        if request is None:
            return self._finished.pop(request_id, CachedContent((), ()))
        groups = self.kv_cache_manager.get_block_ids(request_id)
        blocks = [self.kv_cache_manager.block_pool.blocks[id] for group in groups for id in group]
        return CachedContent(
            tuple((block.block_id, block.block_hash) for block in blocks),
            tuple(feature.identifier for feature in request.mm_features),
        )

    def _evict_blocks(self, content: CachedContent) -> None:
        """Evict its blocks, without those that hold another request's content by now."""
        blocks = self.kv_cache_manager.block_pool.blocks
        same = {id for id, digest in content.blocks if blocks[id].block_hash == digest}
        self.kv_cache_manager.evict_blocks(same)

    def _evict_media(self, content: CachedContent) -> None:
        """Evict its embeddings, without those that other requests use now."""
        cache = self.encoder_cache_manager
        for identifier in content.media:
            if (size := cache.freeable.pop(identifier, None)) is not None:
                del cache.cached[identifier]
                del cache.num_embeds_by_hash[identifier]
                cache.freed.append(identifier)
                cache.num_free_slots += size


def end_with_parent() -> None:
    """Kill this process and its children once its parent has ended.

    When a worker is killed, vLLM's engine would keep running with all its memory, and vLLM's own
    workers take long to notice.
    """
    parent = multiprocessing.parent_process()
    if parent is None or parent.pid is None:
        return  # the engine runs inside the worker's process
    with contextlib.suppress(ProcessLookupError):
        descriptor = os.pidfd_open(parent.pid)
        if os.getppid() == parent.pid:  # else another process has its id
            select.select([descriptor], [], [])
    EngineProcesses([os.getpid()]).kill()  # this process included


def is_borrowed(request: Request) -> bool:
    """Whether it has inputs that may prove stale: a KV cache or embeddings of another worker."""
    if (request.kv_transfer_params or {}).get("do_remote_prefill"):
        return True
    return any(
        item.data is not None and EMBEDDING_FIELD in item.data for item in request.mm_features
    )


def has_content(data: Any) -> bool:
    """Whether an item has pixels, a spectrum or an embedding: a tensor of two or more dimensions.
    Grids, lengths and times are vectors and numbers."""
    return data is not None and any(_large(value) for value in data.get_data().values())


def _large(value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        return value.ndim > 1
    return isinstance(value, list | tuple) and any(_large(part) for part in value)


class GuardedAsyncScheduler(GuardedScheduler, AsyncScheduler):  # type: ignore[misc]
    """With asynchronous scheduling: while one step runs, vLLM schedules the next."""
