"""SGLang's stream becomes deltas: tokens once, cut where the request stops, aborts as errors."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from triptych.engines.base import Generation
from triptych.engines.sglang.engine import SGLangStream
from triptych.errors import EngineFailed, Overloaded, TicketLost
from triptych.messages import Delta, PromptInfo, Sampling, TokenLogprob, TopLogprob, Work

PROMPT = (5, 6, 7)


def chunks(told: bool = False, phases: str = "PD", **sampling: object) -> SGLangStream:
    layout: Any = SimpleNamespace(ids=PROMPT, places=())
    work = Work("w", PROMPT, (), Sampling(seed=1, **sampling), return_prompt_ids=told)
    return SGLangStream(Generation(work, phases, ()), layout)


def chunk(*ids: int, finish: object = None, **meta: object) -> dict[str, object]:
    return {"output_ids": list(ids), "meta_info": {"finish_reason": finish, **meta}}


def told(delta: Delta | None) -> tuple[object, ...]:
    assert delta is not None
    return delta.ids, delta.finish, delta.prompt


def test_the_prompt_comes_once_with_the_first_tokens():
    stream = chunks()
    first = stream.take(chunk(1, 2, cached_tokens=2))
    assert told(first) == ((1, 2), None, PromptInfo(3, 2))
    assert told(stream.take(chunk(3, cached_tokens=2))) == ((3,), None, None)


def test_the_prompts_ids_come_when_they_are_asked_for():
    delta = chunks(told=True).take(chunk(1))
    assert told(delta) == ((1,), None, PromptInfo(3, 0, PROMPT))


def test_a_chunk_without_news_is_none():
    assert chunks().take(chunk()) is None


@pytest.mark.parametrize("kind", ["stop", "length"])
def test_a_finish_is_emitted_even_without_a_token(kind: str):
    stream = chunks()
    stream.take(chunk(1))
    last = stream.take(chunk(finish={"type": kind}))
    assert told(last) == ((), kind, None)
    assert last is not None
    assert last.timings is not None
    assert "decode" in last.timings


def test_what_sglang_ignores_stops_here():
    """Who ignores end tokens gives stop tokens that SGLang ignores as well."""
    stream = chunks(ignore_eos=True, stop_token_ids=(9,), logprobs=0)
    lines = [(-0.5, id, None) for id in (8, 9, 10)]
    delta = stream.take(chunk(8, 9, 10, output_token_logprobs=lines))
    assert told(delta)[:2] == ((8, 9), "stop")
    assert delta is not None
    assert len(delta.logprobs) == 2


def test_stops_that_sglang_applies_are_left_to_it():
    assert told(chunks(stop_token_ids=(9,)).take(chunk(8, 9, 10)))[:2] == ((8, 9, 10), None)


def test_logprobs_of_the_chosen_and_the_best():
    stream = chunks(logprobs=2)
    delta = stream.take(
        chunk(
            4,
            output_token_logprobs=[(-0.5, 4, None)],
            output_top_logprobs=[[(-0.5, 4, None), (-1.5, 3, None)]],
        )
    )
    assert delta is not None
    assert delta.logprobs == (TokenLogprob(-0.5, (TopLogprob(4, -0.5), TopLogprob(3, -1.5))),)


def test_logprobs_of_the_chosen_alone():
    delta = chunks(logprobs=0).take(
        chunk(4, output_token_logprobs=[(-0.5, 4, None)], output_top_logprobs=[])
    )
    assert delta is not None
    assert delta.logprobs == (TokenLogprob(-0.5),)


def test_logprobs_are_given_to_none_else():
    delta = chunks().take(chunk(4, output_token_logprobs=[(-0.5, 4, None)]))
    assert delta is not None
    assert delta.logprobs == ()


@pytest.mark.parametrize(("phases", "error"), [("D", TicketLost), ("PD", EngineFailed)])
def test_an_abort_is_an_error(phases: str, error: type[Exception]):
    with pytest.raises(error, match="no room"):
        chunks(phases=phases).take(chunk(finish={"type": "abort", "message": "no room"}))


@pytest.mark.parametrize("phases", ["D", "PD"])
def test_sglangs_own_limits_are_overload(phases: str):
    full = {"type": "abort", "message": "The request queue is full.", "status_code": 503}
    with pytest.raises(Overloaded, match="queue is full"):
        chunks(phases=phases).take(chunk(finish=full))


@pytest.mark.parametrize(("phases", "error"), [("D", TicketLost), ("PD", EngineFailed)])
def test_another_status_is_not_an_overload(phases: str, error: type[Exception]):
    failed = {"type": "abort", "message": "no KV cache came", "status_code": 500}
    with pytest.raises(error, match="no KV cache"):
        chunks(phases=phases).take(chunk(finish=failed))
