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
