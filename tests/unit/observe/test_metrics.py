from triptych.messages import ParameterCounts, WorkerReport
from triptych.observe.metrics import Histogram, Metrics


def test_histogram_counts_by_upper_bound():
    histogram = Histogram((1.0, 2.0))
    for value in (0.5, 1.0, 1.5, 5.0):
        histogram.add(value)
    assert histogram.counts == [2, 1, 1]
    (family,) = [histogram.family("x", "about")]
    values = {sample.labels.get("le", sample.name): sample.value for sample in family.samples}
    assert values == {"1.0": 2, "2.0": 3, "+Inf": 4, "x_count": 4, "x_sum": 8.0}


def test_text_has_the_prefix():
    metrics = Metrics(prefix="mine")
    metrics.answered("/x", 200)
    metrics.answered("/x", 200)
    text = metrics.text([]).decode()
    assert 'mine_requests_total{route="/x",status="200"} 2.0' in text
    assert "triptych" not in text


def test_what_engines_count_is_a_counter_for_each_name():
    reports = [
        WorkerReport(
            id, id[0], 1, 1, "ready", "fake", ParameterCounts(), 0, 0, 0, 0, 0, 0, 0, {}, {}, counts
        )
        for id, counts in (
            ("P-0", {"steps": 3.0, "embedding_cache_bytes": 7.0}),
            ("D-0", {"steps": 4.0, "preemptions": 1.0}),
        )
    ]
    text = Metrics().text(reports).decode()
    assert text.count("# TYPE triptych_worker_engine_steps_total counter") == 1
    assert 'triptych_worker_engine_steps_total{role="P",worker="P-0"} 3.0' in text
    assert 'triptych_worker_engine_steps_total{role="D",worker="D-0"} 4.0' in text
    assert 'triptych_worker_engine_preemptions_total{role="D",worker="D-0"} 1.0' in text
    # What is held goes down again: Prometheus would take that of a counter for a restart.
    assert "# TYPE triptych_worker_engine_embedding_cache_bytes gauge" in text
    assert 'triptych_worker_engine_embedding_cache_bytes{role="P",worker="P-0"} 7.0' in text
