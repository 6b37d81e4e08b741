"""The address that a worker registers must be reachable from other hosts."""

import logging

import pytest

from triptych.config import Config
from triptych.errors import InvalidConfig
from triptych.stages.process import _check_reachable


@pytest.mark.parametrize("host", ["0.0.0.0", "::"])
def test_an_address_that_is_none_is_refused(host):
    with pytest.raises(InvalidConfig, match="--worker-host"):
        _check_reachable(Config(join="nats://10.0.0.1:4222", worker_host=host))


@pytest.mark.parametrize(
    ("join", "host", "warned"),
    [
        ("nats://10.0.0.1:4222", "127.0.0.1", True),
        ("nats://nats:4222", "localhost", True),
        ("nats://localhost,nats://[::1]:4222,nats://127.0.0.2", "127.0.0.1", False),
        ("nats://10.0.0.1:4222", "10.0.0.2", False),
    ],
)
def test_a_worker_that_only_its_own_host_reaches_warns(join, host, warned, caplog):
    with caplog.at_level(logging.WARNING):
        _check_reachable(Config(join=join, worker_host=host))
    assert ("--worker-host" in caplog.text) == warned
