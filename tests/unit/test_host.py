import socket

import pytest

from triptych.errors import InvalidConfig
from triptych.host import free_port, join_host_port


def test_a_free_port_can_be_had():
    assert free_port("127.0.0.1", 0) > 0


def test_a_port_in_use_is_refused_with_the_flag_for_another():
    taken = socket.create_server(("127.0.0.1", 0))
    with taken, pytest.raises(InvalidConfig, match=r"in use.*--port"):
        free_port("127.0.0.1", taken.getsockname()[1])


@pytest.mark.parametrize("host", ["192.0.2.1", "no such host", "x" * 80, "::zz"])
def test_a_wrong_host_is_not_blamed_on_the_port(host):
    with pytest.raises(InvalidConfig, match="--worker-host") as refused:
        free_port(host, 0, "--worker-host")
    assert "--port" not in str(refused.value)


def test_ipv6_stands_in_brackets():
    assert join_host_port("::1", 80) == "[::1]:80"
    assert join_host_port("localhost", 80) == "localhost:80"
