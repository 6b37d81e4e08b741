"""The thread that pumps NIXL, without NIXL."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from triptych.transfer import nixl_agent as agent_module
from triptych.transfer.nixl_agent import NixlAgent


class Silent:
    """An agent of NIXL's to which nobody speaks."""

    def get_new_notifs(self, backends: list[str]) -> dict[str, list[bytes]]:
        return {}


class Steps:
    """An operation that wants to go on at once, so many times."""

    pace = 1e-9

    def __init__(self, count: int) -> None:
        self.count = count
        self.over = threading.Event()

    def step(self) -> bool:
        self.count -= 1
        if not self.count:
            self.over.set()
        return not self.count

    def abort(self) -> None:
        self.over.set()


@pytest.fixture
def agent(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(agent_module, "_make_agent", lambda name, interface: Silent())
    agent = NixlAgent("me", "127.0.0.1", lambda: False)
    yield agent
    agent.close()


def test_the_pump_goes_on_however_short_a_nap_is(agent: NixlAgent) -> None:
    """With a SimpleQueue it stood still, most times within some thousand: see the agent's."""
    for _ in range(5_000):
        operation = Steps(3)
        agent.submit(agent.operations.append, operation)
        assert operation.over.wait(10)
        assert not operation.count
