"""SGLang's processes get the worker's address to listen at; all of it without SGLang."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace

import pytest

from triptych.engines.sglang import options

FOLDER = Path("/run/worker")
STORE = "SGLANG_DISTRIBUTED_INIT_METHOD_OVERRIDE"
DEVICES = {"GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "UCX_NET_DEVICES"}


@pytest.fixture(autouse=True)
def nothing_set(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*DEVICES, STORE, "SGLANG_HOST_IP", "MASTER_ADDR", "MASTER_PORT", "UCX_TLS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(options, "free_port", lambda *_: 4321)


def told(host: str = "127.0.0.1", **arguments: object) -> dict[str, str]:
    given = {"nnodes": 1, "dp_size": 1, "dist_init_addr": None} | arguments
    return options.sglang_environment(host, SimpleNamespace(**given), FOLDER, os.environ)


def test_a_worker_of_one_machine_listens_there_only():
    made = told()
    assert made["SGLANG_HOST_IP"] == "127.0.0.1"
    assert made[STORE] == "file:///run/worker/ranks"
    assert {made[name] for name in DEVICES} == {"lo"}
    assert (made["MASTER_ADDR"], made["MASTER_PORT"]) == ("127.0.0.1", "4321")


def test_a_host_name_is_resolved_to_an_address():
    assert told("localhost")["SGLANG_HOST_IP"] in ("127.0.0.1", "::1")


def test_a_worker_reached_from_other_hosts_may_use_every_device():
    made = told("192.0.2.7")
    assert made["SGLANG_HOST_IP"] == "192.0.2.7"
    assert not DEVICES & made.keys()


def test_sglang_chooses_where_any_address_would_do():
    assert "SGLANG_HOST_IP" not in told("0.0.0.0")


@pytest.mark.parametrize(
    "arguments", [{"dp_size": 2}, {"dist_init_addr": "127.0.0.1:5"}, {"nnodes": 2}], ids=str
)
def test_a_file_is_for_one_group_of_ranks_on_one_machine(arguments: dict[str, object]):
    assert STORE not in told(**arguments)


def test_ranks_on_other_machines_connect_to_the_rendezvous_address():
    assert not DEVICES & told(nnodes=2).keys()


@pytest.mark.parametrize("name", ["SGLANG_HOST_IP", STORE, *sorted(DEVICES)])
def test_options_of_the_operator_stay(name: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv(name, "theirs")
    assert name not in told()


def test_who_chooses_transports_chooses_devices(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("UCX_TLS", "rc")
    assert "UCX_NET_DEVICES" not in told()
