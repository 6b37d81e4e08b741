"""What happens to a request before SGLang sees it; all of it without SGLang."""

from __future__ import annotations

import asyncio
import contextlib
import sys
import threading
from collections.abc import AsyncIterator, Sequence
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from triptych.engines.adapter.base import write_note
from triptych.engines.base import Generation, Media
from triptych.engines.sglang import engine, requests
from triptych.engines.sglang.engine import SGLangEngine
from triptych.errors import Overloaded, TicketLost
from triptych.messages import Delta, MediaItem, MediaMeta, Sampling, Work
from triptych.transfer.base import LOOP_COPY_BYTES, Array

PRETENDED = "2.2.2.2"
WIDTH = 4


def empty(dtype: str, shape: tuple[int, ...]) -> Array:
    size = torch.Size(shape).numel() * (1 if dtype == "uint8" else 4)
    return Array(memoryview(bytearray(size)), dtype, shape)


class Running:
    """A client of SGLang that is asked, and whose queue is full."""

    def __init__(self) -> None:
        self.asked: list[dict[str, Any]] = []
        self.client = self
        self.manager = SimpleNamespace(mm_processor=SimpleNamespace(), max_req_input_len=1 << 20)

    @contextlib.asynccontextmanager
    async def request(self) -> AsyncIterator[None]:
        yield

    async def async_generate(self, **asked: Any) -> AsyncIterator[dict[str, Any]]:
        self.asked.append(asked)

        async def stream() -> AsyncIterator[dict[str, Any]]:
            full = {"type": "abort", "message": "full", "status_code": 503}
            yield {"output_ids": [], "meta_info": {"finish_reason": full}}

        return stream()


class Family:
    """Tells in which threads it works."""

    width = WIDTH

    def __init__(self) -> None:
        self.threads: list[threading.Thread] = []

    def layout(self, prompt: tuple[int, ...], _at: Sequence[int], _metas: Sequence[Any]) -> Any:
        self.threads.append(threading.current_thread())
        return SimpleNamespace(ids=prompt, places=())


@pytest.fixture
def running(monkeypatch: pytest.MonkeyPatch) -> Running:
    module: Any = ModuleType("sglang.srt.disaggregation.utils")
    module.FAKE_BOOTSTRAP_HOST = PRETENDED
    for name in ("sglang", "sglang.srt", "sglang.srt.disaggregation"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, module.__name__, module)
    return Running()


def made(running: Running, family: Family) -> SGLangEngine:
    model = SimpleNamespace(vocabulary=100, context=1 << 20, end_ids=())
    given: Any = (running, family, model)
    return SGLangEngine(*given, torch.float32, empty, None, split=True)


def words(phases: str, count: int = 3, kv: tuple[Array, ...] = ()) -> Generation:
    return Generation(Work("w", (1,) * count, (), Sampling(seed=1)), phases, (), kv)


def media(tokens: int, prompt: int = 3) -> Generation:
    item = Media(MediaMeta(b"k" * 32, tokens, (1, 2, 4)), (empty("float32", (tokens, WIDTH)),))
    work = Work("w", (1,) * prompt, (MediaItem("image", 0, b""),), Sampling(seed=1))
    return Generation(work, "PD", (item,))


def no_emit(_: object) -> None: ...


@pytest.mark.parametrize("note", [{"host": PRETENDED, "port": 1, "room": 1}, {"host": "a"}])
async def test_decode_refuses_a_note_that_cannot_be_right(running: Running, note: dict[str, Any]):
    decode = words("D", kv=(write_note(empty, note),))
    with pytest.raises(TicketLost):
        await made(running, Family()).generate(decode, no_emit)
    assert not running.asked


async def test_decode_asks_where_the_note_says(running: Running):
    note = {"host": "127.0.0.1", "port": 7, "room": 9}
    decode = words("D", kv=(write_note(empty, note),))
    with pytest.raises(Overloaded):
        await made(running, Family()).generate(decode, no_emit)
    [asked] = running.asked
    assert {name: asked[f"bootstrap_{name}"] for name in note} == note


@pytest.mark.parametrize("count", [engine.LONG_PROMPT - 1, engine.LONG_PROMPT])
async def test_a_long_prompt_is_prepared_off_the_event_loop(
    running: Running, monkeypatch: pytest.MonkeyPatch, count: int
):
    family = Family()

    def scheduler_inputs(*_: object) -> None:
        family.threads.append(threading.current_thread())

    monkeypatch.setattr(requests, "scheduler_inputs", scheduler_inputs)
    with pytest.raises(Overloaded):
        await made(running, family).generate(media(0, prompt=count), no_emit)
    off = [thread is not threading.current_thread() for thread in family.threads]
    assert off == [count == engine.LONG_PROMPT] * 2


async def test_lent_embeddings_are_read_no_longer_than_the_call(
    running: Running, monkeypatch: pytest.MonkeyPatch
):
    begun, may_end = threading.Event(), threading.Event()

    def own(*_: object) -> list[None]:
        begun.set()
        may_end.wait()
        return [None]

    monkeypatch.setattr(requests, "copy_embeddings", own)
    emitted: list[Delta] = []
    large = media(LOOP_COPY_BYTES // (4 * WIDTH) + 1)
    call: Any = made(running, Family()).generate(large, emitted.append)  # type: ignore[arg-type]
    task = asyncio.create_task(call)
    await asyncio.to_thread(begun.wait)
    try:
        task.cancel()
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert not task.done()
    finally:
        may_end.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert not emitted
    assert not running.asked
