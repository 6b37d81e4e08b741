"""Time is told once for what precedes the first token, and once at the end."""

from __future__ import annotations

import pytest

from triptych.engines.adapter import spent
from triptych.engines.adapter.spent import RequestTimer


@pytest.mark.parametrize(("span", "before"), [("P", "prefill"), ("PD", "prefill"), ("D", "import")])
def test_each_stage_is_told_once(monkeypatch: pytest.MonkeyPatch, span: str, before: str):
    clock = iter([10.0, 12.0, 13.0, 17.0])
    monkeypatch.setattr(spent.time, "perf_counter", lambda: next(clock))
    stream = RequestTimer(span)
    assert stream.until_now(ended=False) == {before: 2.0}
    assert stream.until_now(ended=False) is None
    assert stream.until_now(ended=True) == {"decode": 5.0}


def test_one_token_is_both(monkeypatch: pytest.MonkeyPatch):
    clock = iter([10.0, 12.0])
    monkeypatch.setattr(spent.time, "perf_counter", lambda: next(clock))
    assert RequestTimer("PD").until_now(ended=True) == {"prefill": 2.0, "decode": 0.0}
