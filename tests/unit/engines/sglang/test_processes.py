"""What becomes of requests when SGLang's processes end; all of it without SGLang."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest

from triptych.engines.sglang import processes
from triptych.engines.sglang.processes import SGLangProcesses
from triptych.errors import StartError, WorkerLost


class Socket:
    def close(self, linger: int) -> None: ...


class Manager:
    recv_from_detokenizer = send_to_scheduler = Socket()

    async def handle_loop(self) -> None:
        await asyncio.get_running_loop().create_future()


class Client:
    """As much of SGLang's Engine as is touched here. Its one process does nothing."""

    port_args = ModuleType("port_args")
    send_to_rpc = Socket()

    def __init__(self) -> None:
        self.tokenizer_manager = Manager()
        self.process = subprocess.Popen(["sleep", "60"])

    def get_all_child_pids(self) -> list[int]:
        return [self.process.pid]

    def shutdown(self) -> None: ...

    def end(self) -> None:
        self.process.kill()
        self.process.wait()


@pytest.fixture
def client(monkeypatch: pytest.MonkeyPatch) -> Iterator[Client]:
    module: Any = ModuleType("sglang.srt.utils")
    module.kill_process_tree = lambda _pid: None
    for name in ("sglang", "sglang.srt"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, module.__name__, module)
    client = Client()
    monkeypatch.setattr(processes, "_start", lambda _: client)
    yield client
    client.end()


async def test_all_requests_fail_when_the_engine_has_ended(client: Client):
    """A call while the first ones still end gets the same error."""
    engine = SGLangProcesses(None)
    waiting, leaving, left = asyncio.Event(), asyncio.Event(), asyncio.Event()

    async def wait() -> None:
        async with engine.request():
            try:
                waiting.set()
                await asyncio.get_running_loop().create_future()
            finally:
                leaving.set()
                await left.wait()

    first = asyncio.create_task(wait())
    await waiting.wait()
    client.end()
    await leaving.wait()
    assert engine.died.is_set()
    with pytest.raises(WorkerLost):
        async with engine.request():
            pytest.fail("there is no engine")
    left.set()
    with pytest.raises(WorkerLost):
        await first
    engine.close()


async def test_a_timeout_of_the_requests_own_stays_one(client: Client):
    engine = SGLangProcesses(None)
    with pytest.raises(TimeoutError):
        async with engine.request(), asyncio.timeout(0):
            await asyncio.get_running_loop().create_future()
    assert not engine.died.is_set()
    engine.close()


def test_a_process_that_ended_at_once_is_a_failed_start(client: Client):
    client.end()
    with pytest.raises(StartError, match="ended"):
        SGLangProcesses(None)
