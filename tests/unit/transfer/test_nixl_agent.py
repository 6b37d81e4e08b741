"""The thread that pumps NIXL, without NIXL."""

from __future__ import annotations

import sys
import threading
from types import SimpleNamespace
from typing import Any

import pytest

from triptych.errors import InvalidConfig
from triptych.transfer import nixl_agent as agent_module
from triptych.transfer.nixl_agent import NixlAgent, NixlError


class Silent:
    """An agent of NIXL's without peers."""

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
    monkeypatch.setattr(agent_module, "_make_agent", lambda name, host: Silent())
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


@pytest.fixture
def _played_nixl(monkeypatch: pytest.MonkeyPatch) -> None:
    played = SimpleNamespace(
        nixl_agent=lambda name, config: Silent(), nixl_agent_config=lambda **options: None
    )
    monkeypatch.setitem(sys.modules, "nixl_cu13", SimpleNamespace(_api=played))
    monkeypatch.setitem(sys.modules, "nixl_cu13._api", played)
    for name in ("UCX_NET_DEVICES", "NIXL_LOG_LEVEL", "UCX_LOG_LEVEL"):
        monkeypatch.setenv(name, "")  # so that what the agent sets is undone
        monkeypatch.delenv(name)


NOT_HERE = "203.0.113.77"  # a documentation address: no interface has it


@pytest.mark.usefixtures("_played_nixl")
def test_an_address_of_no_interface_is_invalid_config() -> None:
    """Off: ``_translated`` makes a NixlError of it."""
    with pytest.raises(InvalidConfig, match="no interface"):
        NixlAgent("me", NOT_HERE, lambda: False)


@pytest.mark.usefixtures("_played_nixl")
def test_ucx_net_devices_overrules_the_interface(monkeypatch: pytest.MonkeyPatch) -> None:
    """Off: ``interface_of`` is called whether the variable is set or not."""
    monkeypatch.setenv("UCX_NET_DEVICES", "eth7")
    NixlAgent("me", NOT_HERE, lambda: False).close()


def test_a_method_that_this_nixl_lacks_does_not_end_the_thread(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Off: ``_Nixl.call`` looks the method up outside ``_translated``."""
    monkeypatch.setattr(agent_module, "_make_agent", lambda name, host: object())
    agent = NixlAgent("me", "127.0.0.1", lambda: False)
    try:
        with pytest.raises(NixlError, match="send_notif"):
            agent.submit(agent.notify, "you", b"hello").result(10)
        operation = Steps(3)  # between its steps the thread asks for messages
        agent.submit(agent.operations.append, operation).result(10)
        assert operation.over.wait(10)
        assert not operation.count
        with pytest.raises(NixlError, match="release"):
            agent._nixl.release(object())
    finally:
        agent.close()
