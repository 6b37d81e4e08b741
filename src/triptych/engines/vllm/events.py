"""Who listens to vLLM's KV events.

Only an engine that keeps prefixes has any. The operator may have them published elsewhere than
``options`` says, with --engine-args; then we listen there.
"""

from __future__ import annotations

from typing import Any

from triptych.engines.adapter.kv_listener import KvListener


def kv_listener_of(vllm_config: Any) -> KvListener | None:
    """For an engine of this (complete) configuration; None if it publishes nothing."""
    events = vllm_config.kv_events_config
    caches = vllm_config.cache_config.enable_prefix_caching
    if not caches or events is None or not events.enable_kv_cache_events:
        return None
    if events.publisher != "zmq":
        return None
    again = events.replay_endpoint
    return KvListener(_from_here(events.endpoint), again and _from_here(again))


def _from_here(endpoint: str) -> str:
    """An address to bind to, as one to connect to."""
    return endpoint.replace("//*:", "//127.0.0.1:")
