import ast
from pathlib import Path

import triptych
from triptych.messages import ParameterCounts, WorkerReport
from triptych.observe.metrics import (
    _REPORT_GAUGES,
    _REPORT_INFO,
    DECLARED_METRICS,
    Histogram,
    Metrics,
)


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
    metrics.count_response("/x", 200)
    metrics.count_response("/x", 200)
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
    assert text.count("# TYPE triptych_worker_steps_total counter") == 1
    assert 'triptych_worker_steps_total{role="P",worker="P-0"} 3.0' in text
    assert 'triptych_worker_steps_total{role="D",worker="D-0"} 4.0' in text
    assert 'triptych_worker_preemptions_total{role="D",worker="D-0"} 1.0' in text
    # What is held goes down again: Prometheus would take that of a counter for a restart.
    assert "# TYPE triptych_worker_embedding_cache_bytes gauge" in text
    assert 'triptych_worker_embedding_cache_bytes{role="P",worker="P-0"} 7.0' in text


def test_counters_and_gauges_of_workers_have_different_names():
    assert not DECLARED_METRICS.keys() & {*_REPORT_GAUGES, *_REPORT_INFO, "tensor_bytes"}


def test_a_name_that_is_not_declared_has_no_kind():
    metrics = Metrics()
    metrics.media = {"of_another_version": 1.0}
    assert "# TYPE triptych_media_of_another_version untyped" in metrics.text([]).decode()


# --- every counter is declared


def counter_names(tree):
    """Names in mappings that are called counters or _counts, and kinds of rate-limited warnings."""
    variables = {
        target.id: node.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign)
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and node.name == "counters":
            yield from keys(node, variables)
        elif isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            if any(is_counters(target) for target in targets):
                yield from keys(node.value, variables)
        elif isinstance(node, ast.keyword) and node.arg == "counters":
            yield from keys(node.value, variables)
        elif isinstance(node, ast.Subscript) and is_counters(node.value):
            yield from constants(node.slice)
        elif isinstance(node, ast.Call) and name_of(node.func) == "RateLimitedLog":
            for argument in node.args[1:]:
                yield from constants(variables.get(name_of(argument), argument))


def keys(node, variables):
    for inner in ast.walk(node):
        if isinstance(inner, ast.Dict):
            for key in inner.keys:
                yield from constants(key)
        elif isinstance(inner, ast.Call) and name_of(inner.func) == "fromkeys":
            yield from constants(variables.get(name_of(inner.args[0]), inner.args[0]))
        elif isinstance(inner, ast.Call) and name_of(inner.func) == "Counter":
            yield from (keyword.arg for keyword in inner.keywords)


def constants(node):
    nodes = [] if node is None else ast.walk(node)
    return [n.value for n in nodes if isinstance(n, ast.Constant) and isinstance(n.value, str)]


def name_of(node):
    return getattr(node, "attr", getattr(node, "id", ""))


def is_counters(node):
    return name_of(node) in ("counters", "_counters", "_counts")


def test_every_counter_has_a_kind_and_a_help_text():
    found = {"uploaded_bytes"}  # made by the handler of /metrics
    for path in Path(triptych.__file__).parent.rglob("*.py"):
        found |= set(counter_names(ast.parse(path.read_text())))
    assert found - DECLARED_METRICS.keys() == set(), (
        "declare them in observe.metrics.DECLARED_METRICS"
    )
    assert DECLARED_METRICS.keys() - found == set(), "nothing counts these any more"
    assert all(text.endswith(".") for _, text in DECLARED_METRICS.values())


def test_the_search_finds_every_way_of_counting():
    source = """
NAMES = ("a", "b")
class Engine:
    def __init__(self):
        self._counts = dict.fromkeys(NAMES, 0)
        self.counters = {"c": 0.0} | Counter(d=0)
        self._limited = RateLimitedLog(log, "e", KIND)
    @property
    def counters(self):
        return {**self._counts, "f": 1}
    def step(self):
        self._counters["g" if self.x else "h"] += 1
        return Report(counters={"i": 1})
KIND = "j"
"""
    assert set(counter_names(ast.parse(source))) == set("abcdefghij")
