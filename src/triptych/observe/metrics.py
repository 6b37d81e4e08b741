"""The metrics of a frontend and their Prometheus text.

Counting touches plain numbers only, since some of it happens for every token; the Prometheus
library reads them when /metrics is called. Workers are not scraped: the frontend exports their
reports. ``DECLARED_METRICS`` declares the kind and help text of everything that is counted by name.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
    Metric,
    UnknownMetricFamily,
)

from triptych.messages import WorkerReport
from triptych.observe.event_loop_lag import STALL_SECONDS, EventLoopLag

CONTENT_TYPE = CONTENT_TYPE_LATEST.encode()
LATENCY_BOUNDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
TTFT_BOUNDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
ITL_BOUNDS = (0.001, 0.0025, 0.005, 0.0075, 0.01, 0.02, 0.03, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5)

MetricFamily = type[CounterMetricFamily] | type[GaugeMetricFamily] | type[UnknownMetricFamily]
_COUNTER, _GAUGE = CounterMetricFamily, GaugeMetricFamily
DECLARED_METRICS: dict[str, tuple[MetricFamily, str]] = {
    # media, in the frontend
    "fetched_files": (_COUNTER, "Media files fetched from URLs."),
    "fetched_bytes": (_COUNTER, "Bytes of these."),
    "fetch_failures": (_COUNTER, "Media URLs that could not be fetched."),
    "fetch_cache_hits": (_COUNTER, "Media URLs found in the cache of fetched files."),
    "fetch_cache_misses": (_COUNTER, "Media URLs not found in the cache of fetched files."),
    "fetch_cache_evictions": (_COUNTER, "Files dropped from the cache of fetched files."),
    "fetch_cache_bytes": (_GAUGE, "Bytes in the cache of fetched files."),
    "fetch_process_losses": (_COUNTER, "Fetch processes that died or hung."),
    "loaded_bytes": (_GAUGE, "Bytes of media that requests hold from URLs, files and uploads."),
    "loaded_peak_bytes": (_GAUGE, "The most bytes of these so far."),
    "loaded_waiting": (_GAUGE, "Requests that wait to load media."),
    "uploaded_bytes": (_GAUGE, "Bytes of uploads."),
    "large_bodies_bytes": (_GAUGE, "Bytes of large request bodies."),
    "large_bodies_peak_bytes": (_GAUGE, "The most bytes of these so far."),
    "large_bodies_waiting": (_GAUGE, "Large request bodies that wait unread."),
    "large_bodies_refused": (_COUNTER, "Large request bodies refused with 429."),
    # media, where they are decoded and encoded
    "decoded_items": (_COUNTER, "Media items decoded."),
    "decode_seconds": (_COUNTER, "Seconds of decoding."),
    "decode_crashes": (_COUNTER, "Decoding processes that crashed."),
    "decoded_cache_hits": (_COUNTER, "Items found in the cache of decoded media."),
    "decoded_cache_misses": (_COUNTER, "Items not found in the cache of decoded media."),
    "decoded_cache_evictions": (_COUNTER, "Items dropped from the cache of decoded media."),
    "decoded_cache_bytes": (_GAUGE, "Bytes in the cache of decoded media."),
    "embedding_cache_hits": (_COUNTER, "Items found in the embedding cache."),
    "embedding_cache_misses": (_COUNTER, "Items not found in the embedding cache."),
    "embedding_cache_evictions": (_COUNTER, "Embeddings dropped from the embedding cache."),
    "embedding_cache_bytes": (_GAUGE, "Bytes in the embedding cache."),
    "embedding_cache_items": (_GAUGE, "Embeddings in the embedding cache."),
    "encodes_joined": (_COUNTER, "Items that were being encoded for another request already."),
    "encoded_items": (_COUNTER, "Media items encoded."),
    "encoder_batches": (_COUNTER, "Batches of the encoder."),
    "images_passed": (_COUNTER, "Images passed to the engine's own encoder."),
    # engines
    "steps": (_COUNTER, "Steps of the engine."),
    "busy_seconds": (_COUNTER, "Seconds that the engine spent in steps."),
    "prompt_tokens": (_COUNTER, "Tokens of prompts."),
    "cached_tokens": (_COUNTER, "Of these, from the prefix cache."),
    "computed_prompt_tokens": (_COUNTER, "Of these, computed here."),
    "transferred_tokens": (_COUNTER, "Of these, with a KV cache from another worker."),
    "generated_tokens": (_COUNTER, "Tokens generated."),
    "preemptions": (_COUNTER, "Sequences preempted for lack of KV blocks."),
    "prefix_cache_queries": (_COUNTER, "Tokens looked up in the prefix cache."),
    "prefix_cache_hits": (_COUNTER, "Of these, found."),
    "kv_blocks_stored": (_COUNTER, "Blocks that the engine reported as cached."),
    "kv_blocks_removed": (_COUNTER, "Blocks that the engine reported as removed."),
    "kv_events_missed": (_COUNTER, "KV events of the engine that were lost."),
    "kv_blocks_reported": (_GAUGE, "Cached blocks that the worker has reported to frontends."),
    "kv_changes_sent": (_COUNTER, "Cache changes that the worker has sent to frontends."),
    "kv_watchers": (_GAUGE, "Frontends that watch the worker's cache."),
    # routing by KV cache
    "lookups": (_COUNTER, "Prompts looked up."),
    "blocks": (_COUNTER, "Blocks of these."),
    "matched_blocks": (_COUNTER, "Of these, cached at the chosen worker."),
    "predicted_blocks": (_COUNTER, "Of these, expected there and not reported."),
    "decode_only": (_COUNTER, "Prompts that only a decode worker got."),
    "changes": (_COUNTER, "Cache changes that workers reported."),
    "changes_missed": (_COUNTER, "Cache changes that arrived after one that was lost."),
    "indexed_blocks": (_GAUGE, "Blocks that workers have reported as cached."),
    "expected_blocks": (_GAUGE, "Blocks that are expected to be cached."),
    "learned_media": (_GAUGE, "Media whose tokens are known from earlier responses."),
    # warnings that are rate-limited in the log
    "connections_refused": (_COUNTER, "Client connections refused for lack of descriptors."),
    "tls_handshakes_failed": (_COUNTER, "TLS handshakes with clients that failed."),
    "frames_broken": (_COUNTER, "Frames between processes that could not be read."),
    "frames_forged": (_COUNTER, "Frames between processes with a wrong MAC."),
    "callers_refused": (_COUNTER, "Connections to workers that were refused."),
    "records_rejected": (_COUNTER, "Records of workers in discovery that were rejected."),
    "events_unreadable": (_COUNTER, "Events of workers that could not be read."),
    "requests_broken": (_COUNTER, "HTTP requests to workers that could not be read."),
    "decoder_file_errors": (_COUNTER, "Media files on which a decoder library failed."),
    "decoder_library_errors": (_COUNTER, "Failures of a decoder library that is broken."),
}


class Histogram:
    """Counts by upper bound, and a sum."""

    __slots__ = ("bounds", "counts", "sum")

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    def add(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.sum += value

    def family(self, name: str, help_text: str) -> HistogramMetricFamily:
        total, buckets = 0, []
        for bound, count in zip((*map(str, self.bounds), "+Inf"), self.counts, strict=True):
            total += count
            buckets.append((bound, total))
        return HistogramMetricFamily(name, help_text, buckets=buckets, sum_value=self.sum)


class Metrics:
    """The numbers of one frontend."""

    def __init__(self, prefix: str = "triptych") -> None:
        self.requests: dict[tuple[str, int], int] = {}  # by route and status
        self.cancelled = 0  # requests whose client went away
        self.in_flight = 0
        self.prompt_tokens = 0
        self.cached_tokens = 0
        self.output_tokens = 0
        self.loop_lag: EventLoopLag | None = None  # while a server runs
        self.latency = Histogram(LATENCY_BOUNDS)
        self.first_token = Histogram(TTFT_BOUNDS)
        self.between_tokens = Histogram(ITL_BOUNDS)
        self.media: Mapping[str, float] = {}  # of sources, uploads, bodies and a decode pool
        self.routing: Mapping[str, float] = {}  # by KV cache
        self.connections: Mapping[str, float] = {}  # rate-limited warnings
        self._prefix = prefix

    def count_response(self, route: str, status: int) -> None:
        key = (route, status)
        self.requests[key] = self.requests.get(key, 0) + 1

    def text(self, workers: Iterable[WorkerReport]) -> bytes:
        registry = CollectorRegistry(auto_describe=False)
        registry.register(_Snapshot([*self._own(), *self._workers(workers)]))
        return generate_latest(registry)

    def _own(self) -> Iterator[Metric]:
        prefix = self._prefix
        requests = CounterMetricFamily(
            f"{prefix}_requests", "Requests answered.", labels=["route", "status"]
        )
        for (route, status), count in self.requests.items():
            requests.add_metric([route, str(status)], count)
        yield requests
        for name, help_text, count in (
            ("cancelled", "Requests whose client went away.", self.cancelled),
            ("prompt_tokens", "Tokens of prompts.", self.prompt_tokens),
            ("cached_prompt_tokens", "Of these, from the prefix cache.", self.cached_tokens),
            ("output_tokens", "Tokens generated.", self.output_tokens),
        ):
            yield CounterMetricFamily(f"{prefix}_{name}", help_text, value=count)
        for group in ("media", "routing", "connections"):
            for name, value in getattr(self, group).items():
                family, help_text = _declaration(name)
                yield family(f"{prefix}_{group}_{name}", help_text, value=value)
        yield GaugeMetricFamily(
            f"{prefix}_requests_in_flight", "Requests being served.", value=self.in_flight
        )
        if (lag := self.loop_lag) is not None:
            for name, help_text, seconds in (
                ("event_loop_lag", "Recent worst lag of the event loop.", lag.max_lag),
                ("event_loop_work", "Recent worst CPU time of one turn of it.", lag.max_cpu),
            ):
                yield GaugeMetricFamily(f"{prefix}_{name}_seconds", help_text, value=seconds)
            yield CounterMetricFamily(
                f"{prefix}_event_loop_stalls",
                f"Turns over {STALL_SECONDS} s late.",
                value=lag.stalls,
            )
        yield self.latency.family(f"{prefix}_request_seconds", "Time of a completion.")
        yield self.first_token.family(f"{prefix}_first_token_seconds", "Time to the first token.")
        yield self.between_tokens.family(f"{prefix}_between_tokens_seconds", "Time between tokens.")

    def _workers(self, workers: Iterable[WorkerReport]) -> Iterator[Metric]:
        prefix, labels = f"{self._prefix}_worker", ["worker", "role"]
        gauges = {
            name: GaugeMetricFamily(f"{prefix}_{name}", help_text, labels=labels)
            for name, help_text in _REPORT_GAUGES.items()
        }
        info = InfoMetricFamily(prefix, "Where it runs and how it is called.", labels=labels)
        tensor_bytes = CounterMetricFamily(
            f"{prefix}_tensor_bytes",
            "Bytes of tensors moved.",
            labels=[*labels, "transport", "direction"],
        )
        counters: dict[str, CounterMetricFamily | GaugeMetricFamily | UnknownMetricFamily] = {}
        for worker in workers:
            identity = [worker.id, worker.role]
            info.add_metric(identity, {name: getattr(worker, name) for name in _REPORT_INFO})
            for name, gauge in gauges.items():
                gauge.add_metric(identity, getattr(worker, name))
            for transport, count in worker.bytes_sent.items():
                tensor_bytes.add_metric([*identity, transport, "sent"], count)
            for transport, count in worker.bytes_received.items():
                tensor_bytes.add_metric([*identity, transport, "received"], count)
            for name, total in worker.counters.items():
                if name not in counters:
                    family, help_text = _declaration(name)
                    counters[name] = family(f"{prefix}_{name}", help_text, labels=labels)
                counters[name].add_metric(identity, total)
        yield info
        yield from gauges.values()
        yield tensor_bytes
        yield from counters.values()


def _declaration(name: str) -> tuple[MetricFamily, str]:
    """Kind and help text; a worker of another version may report names that are not declared."""
    return DECLARED_METRICS.get(name, (UnknownMetricFamily, f"Undeclared: {name}."))


_REPORT_INFO = ("host", "request_plane", "event_plane")  # not what changes with each restart
_REPORT_GAUGES = {
    "queued": "Requests waiting in the engine.",
    "running": "Requests running in the engine.",
    "kv_blocks_total": "Blocks of the KV cache.",
    "kv_blocks_free": "Of these, free.",
    "tickets": "Tickets published and not yet released.",
    "segments": "Shared-memory segments in use.",
    "descriptors": "Open file descriptors.",
    "loop_lag": "Recent worst lag of its event loop, in seconds.",
    "loop_work": "Recent worst CPU time of one turn of its event loop, in seconds.",
    "loop_stalls": "Turns of its event loop that were too late, so far.",
}


class _Snapshot:
    """Metric families, as the registry collects them."""

    def __init__(self, families: list[Metric]) -> None:
        self._families = families

    def collect(self) -> Iterable[Metric]:
        return self._families
