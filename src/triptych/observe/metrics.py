"""What a frontend counts, and the Prometheus text of it.

Counting touches plain numbers only, since some of it happens for every token; the Prometheus
library sees them when somebody asks. Workers are not scraped: their reports are shown here.
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
)

from triptych.messages import WorkerReport
from triptych.observe.event_loop_lag import STALL_SECONDS, EventLoopLag

CONTENT_TYPE = CONTENT_TYPE_LATEST.encode()
LATENCY = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
FIRST = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
GAP = (0.001, 0.0025, 0.005, 0.0075, 0.01, 0.02, 0.03, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5)


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

    def family(self, name: str, about: str) -> HistogramMetricFamily:
        total, buckets = 0, []
        for bound, count in zip((*map(str, self.bounds), "+Inf"), self.counts, strict=True):
            total += count
            buckets.append((bound, total))
        return HistogramMetricFamily(name, about, buckets=buckets, sum_value=self.sum)


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
        self.latency = Histogram(LATENCY)
        self.first_token = Histogram(FIRST)
        self.between_tokens = Histogram(GAP)
        self.media: dict[str, float] = {}  # of sources, uploads and a decode pool beside us
        self.routing: dict[str, float] = {}  # by KV cache
        self.connections: Mapping[
            str, float
        ] = {}  # to workers: what was refused or could not be read
        self._prefix = prefix

    def answered(self, route: str, status: int) -> None:
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
        for name, about, count in (
            ("cancelled", "Requests whose client went away.", self.cancelled),
            ("prompt_tokens", "Tokens of prompts.", self.prompt_tokens),
            ("cached_prompt_tokens", "Of these, from the prefix cache.", self.cached_tokens),
            ("output_tokens", "Tokens generated.", self.output_tokens),
        ):
            yield CounterMetricFamily(f"{prefix}_{name}", about, value=count)
        for name, value in self.media.items():
            kind = GaugeMetricFamily if name in _HELD else CounterMetricFamily
            yield kind(f"{prefix}_media_{name}", "Of media, in the frontend.", value=value)
        for name, value in self.routing.items():
            kind = GaugeMetricFamily if name in _HELD else CounterMetricFamily
            yield kind(f"{prefix}_routing_{name}", "Of routing by KV cache.", value=value)
        for name, value in self.connections.items():
            about = "Of connections to workers, their records and their events."
            yield CounterMetricFamily(f"{prefix}_connections_{name}", about, value=value)
        yield GaugeMetricFamily(
            f"{prefix}_requests_in_flight", "Requests being served.", value=self.in_flight
        )
        if (lag := self.loop_lag) is not None:
            for name, about, seconds in (
                ("event_loop_lag", "Lateness of the frontend, at worst, lately.", lag.max_lag),
                ("event_loop_work", "CPU time of one turn of it, at worst, lately.", lag.max_cpu),
            ):
                yield GaugeMetricFamily(f"{prefix}_{name}_seconds", about, value=seconds)
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
            name: GaugeMetricFamily(f"{prefix}_{name}", about, labels=labels)
            for name, about in _GAUGES.items()
        }
        info = InfoMetricFamily(prefix, "Where it is and how it is called.", labels=labels)
        moved = CounterMetricFamily(
            f"{prefix}_tensor_bytes",
            "Bytes of tensors moved.",
            labels=[*labels, "transport", "direction"],
        )
        counters: dict[str, CounterMetricFamily | GaugeMetricFamily] = {}
        for worker in workers:
            who = [worker.id, worker.role]
            info.add_metric(who, {name: getattr(worker, name) for name in _INFO})
            for name, gauge in gauges.items():
                gauge.add_metric(who, getattr(worker, name))
            for transport, count in worker.bytes_sent.items():
                moved.add_metric([*who, transport, "sent"], count)
            for transport, count in worker.bytes_received.items():
                moved.add_metric([*who, transport, "received"], count)
            for name, total in worker.counters.items():
                if name not in counters:
                    about = f"Counted in the worker: {name}."
                    kind = GaugeMetricFamily if name in _HELD else CounterMetricFamily
                    counters[name] = kind(f"{prefix}_engine_{name}", about, labels=labels)
                counters[name].add_metric(who, total)
        yield info
        yield from gauges.values()
        yield moved
        yield from counters.values()


_HELD = {  # what is there now; all else counts up
    "uploaded_bytes",
    "large_bodies_bytes",
    "large_bodies_peak_bytes",
    "large_bodies_waiting",
    "loaded_bytes",
    "loaded_peak_bytes",
    "loaded_waiting",
    "fetch_cache_bytes",
    "decoded_cache_bytes",
    "embedding_cache_bytes",
    "embedding_cache_items",
    "indexed_blocks",
    "expected_blocks",
    "learned_media",
    "kv_blocks_reported",
    "kv_watchers",
}
_INFO = ("host", "request_plane", "event_plane")  # not what is another with each restart
_GAUGES = {
    "queued": "Requests waiting in the engine.",
    "running": "Requests running in the engine.",
    "kv_blocks_total": "Blocks of the KV cache.",
    "kv_blocks_free": "Of these, free.",
    "tickets": "Tickets published and not yet released.",
    "segments": "Shared-memory segments in use.",
    "descriptors": "Open file descriptors.",
    "loop_lag": "Seconds that its event loop was late, at worst, lately.",
    "loop_work": "CPU seconds of one turn of its event loop, at worst, lately.",
    "loop_stalls": "Turns of its event loop that were too late, so far.",
}


class _Snapshot:
    """Metric families as the registry wants them."""

    def __init__(self, families: list[Metric]) -> None:
        self._families = families

    def collect(self) -> Iterable[Metric]:
        return self._families
