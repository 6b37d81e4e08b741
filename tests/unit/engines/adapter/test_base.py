"""What adapters share: timings, the stream of deltas, threads, errors of an engine, sizes."""

from __future__ import annotations

import asyncio
import logging
import math
import threading
from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest
from safetensors import safe_open

from triptych import models
from triptych.checkpoint import open_model, packaged_folder
from triptych.engines.adapter import base
from triptych.engines.adapter.base import (
    RequestStream,
    RequestTimer,
    SamplingRequest,
    checkpoint_sizes,
    engine_boundary,
    in_thread,
)
from triptych.engines.base import Generation
from triptych.errors import EngineFailed, InvalidValue, TriptychError, WorkerLost
from triptych.messages import Delta, PromptInfo, Sampling, Work


@pytest.mark.parametrize(
    ("phases", "before"), [("P", "prefill"), ("PD", "prefill"), ("D", "import")]
)
def test_each_stage_is_reported_once(monkeypatch: pytest.MonkeyPatch, phases: str, before: str):
    clock = iter([10.0, 12.0, 13.0, 17.0])
    monkeypatch.setattr(base.time, "perf_counter", lambda: next(clock))
    timer = RequestTimer(phases)
    assert timer.elapsed(ended=False) == {before: 2.0}
    assert timer.elapsed(ended=False) is None
    assert timer.elapsed(ended=True) == {"decode": 5.0}


def test_one_token_is_both(monkeypatch: pytest.MonkeyPatch):
    clock = iter([10.0, 12.0])
    monkeypatch.setattr(base.time, "perf_counter", lambda: next(clock))
    assert RequestTimer("PD").elapsed(ended=True) == {"prefill": 2.0, "decode": 0.0}


def stream(phases: str = "PD", first: Delta | None = None) -> tuple[RequestStream, Counter[str]]:
    counters: Counter[str] = Counter()
    layout: Any = SimpleNamespace(ids=(5, 6, 7), places=())
    work = Work("w", (5, 6, 7), (), Sampling(seed=1), return_prompt_ids=True)
    return RequestStream(Generation(work, phases, (), (), first), layout, counters), counters


def test_a_stream_carries_the_prompt_once_and_counts_tokens():
    made, counters = stream()
    assert made.delta((), None) is None
    assert not made.begun
    first = made.delta((1, 2), None, (), 2)
    assert first is not None
    assert first.prompt == PromptInfo(3, 2, (5, 6, 7))
    last = made.delta((3,), "stop", (), 2)
    assert last is not None
    assert (last.ids, last.finish, last.prompt) == ((3,), "stop", None)
    assert counters == {"prompt_tokens": 3, "cached_tokens": 2, "generated_tokens": 3}


def test_decode_repeats_the_prompt_information_of_prefill():
    info = PromptInfo(3, 1)
    made, counters = stream("D", Delta((), prompt=info))
    delta = made.delta((1,), None, (), 3)
    assert delta is not None
    assert delta.prompt is info
    assert counters["cached_tokens"] == 0


def test_prefill_without_a_token_reports_its_time_alone():
    made, _ = stream("P")
    delta = made.prefill_delta(1)
    assert (delta.ids, delta.finish, delta.prompt) == ((), None, PromptInfo(3, 1, (5, 6, 7)))
    assert delta.timings is not None
    assert set(delta.timings) == {"prefill"}


def test_stop_ids_have_the_end_tokens_unless_they_are_ignored():
    model: Any = SimpleNamespace(end_ids=(1, 2))
    sampling = Sampling(seed=1, stop_token_ids=(2, 9))
    assert SamplingRequest(sampling, model, 1).stop_ids == [1, 2, 9]
    ignoring = Sampling(seed=1, ignore_eos=True, stop_token_ids=(9,))
    assert SamplingRequest(ignoring, model, 1).stop_ids == [9]


@pytest.mark.parametrize(
    ("error", "logged"), [(EngineFailed, True), (WorkerLost, False), (InvalidValue, False)]
)
def test_an_engines_error_becomes_ours_and_names_the_request(
    caplog: pytest.LogCaptureFixture, error: type[TriptychError], logged: bool
):
    with (
        caplog.at_level(logging.ERROR),
        pytest.raises(error, match="theirs"),
        engine_boundary("request-7", lambda cause: error(str(cause))),
    ):
        raise KeyError("theirs")
    assert [record.request_id for record in caplog.records] == ["request-7"] * logged  # type: ignore[attr-defined]


def test_our_own_errors_pass():
    with (
        pytest.raises(WorkerLost),
        engine_boundary("w", lambda _: EngineFailed("not this one")),
    ):
        raise WorkerLost("gone")


async def test_the_result_comes_back():
    assert await in_thread(lambda: threading.current_thread()) is not threading.main_thread()


async def test_an_error_comes_back():
    with pytest.raises(ZeroDivisionError):
        await in_thread(lambda: 1 / 0)


async def test_a_cancelled_call_waits_for_the_end():
    begun, may_end, ended = threading.Event(), threading.Event(), threading.Event()

    def read() -> None:
        begun.set()
        may_end.wait()
        ended.set()

    task = asyncio.create_task(in_thread(read))
    await asyncio.to_thread(begun.wait)
    try:
        for _ in range(2):
            task.cancel()
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            assert not task.done()
    finally:
        may_end.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert ended.is_set()


def test_every_parameter_belongs_to_one_part():
    model = open_model(packaged_folder("triptych-demo"))
    with safe_open(model.folder / "model.safetensors", framework="pt") as file:
        shapes = [file.get_slice(name).get_shape() for name in file.keys()]  # noqa: SIM118
    parts = checkpoint_sizes(models.find_family(model), model)
    assert parts.encoder > 0
    assert parts.language > 0
    assert parts.encoder + parts.language == sum(math.prod(shape) for shape in shapes)
