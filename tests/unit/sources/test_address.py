"""Which addresses may be connected to, and that the gate holds to it."""

import asyncio
import socket
import threading
from ipaddress import ip_address

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from support.origin import NamedGate
from triptych.sources.address import AddressBlocked, AddressFilter, is_permitted

PRIVATE = [
    "10.0.0.1",
    "127.0.0.1",
    "127.255.255.255",
    "172.16.0.1",
    "172.31.255.255",
    "192.168.1.1",
    "100.64.0.1",
    "100.127.255.255",
    "192.0.0.1",
    "192.0.2.7",
    "192.88.99.1",
    "198.18.0.1",
    "198.19.255.255",
    "198.51.100.1",
    "203.0.113.9",
    "240.0.0.1",
    "::1",
    "fc00::1",
    "fd12::1",
    "2001:db8::1",
    "::ffff:10.0.0.1",
    "::ffff:127.0.0.1",
    "64:ff9b::7f00:1",
    "64:ff9b::a00:1",
    "::127.0.0.1",
    "::8.8.8.8",
    "2002:7f00:1::",
    "2002:808:808::1",
    "2001:0:808:808::1",
    "64:ff9b:1::1",
    "2606:4700::5efe:10.0.0.1",
    "2606:4700::200:5efe:127.0.0.1",
    "5f00::1",
    "4000::1",
    "100::1",
    "3fff::1",
    "fec0::1",
    "2001:10::1",
    "2001:20::1",
]
NEVER = [
    "169.254.169.254",
    "169.254.170.2",
    "168.63.129.16",
    "100.100.100.200",
    "192.0.0.192",
    "fd00:ec2::254",
    "0.0.0.0",
    "0.1.2.3",
    "224.0.0.1",
    "239.255.255.255",
    "255.255.255.255",
    "::",
    "fe80::1",
    "fe80::1%eth0",
    "ff02::1",
    "::ffff:169.254.169.254",
    "::ffff:0.0.0.0",
    "64:ff9b::a9fe:a9fe",
    "2002:a9fe:a9fe::1",
    "::169.254.169.254",
    "2606:4700::5efe:169.254.169.254",
]
PUBLIC = [
    "8.8.8.8",
    "1.1.1.1",
    "93.184.216.34",
    "172.15.255.255",
    "172.32.0.1",
    "100.63.255.255",
    "100.128.0.1",
    "192.167.255.255",
    "223.255.255.255",
    "2606:4700:4700::1111",
    "2a00:1450::1",
    "::ffff:8.8.8.8",
    "64:ff9b::808:808",
    "2001:4860:4860::8888",
]


@pytest.mark.parametrize("address", PRIVATE + NEVER)
def test_refused(address):
    assert not is_permitted(ip_address(address), private=False)


@pytest.mark.parametrize("address", PUBLIC)
def test_permitted(address):
    assert is_permitted(ip_address(address), private=False)
    assert is_permitted(ip_address(address), private=True)


def test_private_ones_on_request_but_never_metadata():
    for address in ("10.0.0.1", "127.0.0.1", "::1", "fd12::1", "::ffff:127.0.0.1", "100.64.0.1"):
        assert is_permitted(ip_address(address), private=True), address
    for address in NEVER:
        assert not is_permitted(ip_address(address), private=True), address


@settings(deadline=None)
@given(st.ip_addresses())
def test_permits_nothing_that_python_knows_to_be_closed(address):
    if is_permitted(address, private=False):
        assert not address.is_loopback
        assert not address.is_link_local
        assert not address.is_multicast
        assert not address.is_unspecified
        mapped = getattr(address, "ipv4_mapped", None)
        assert (mapped or address).is_global or int(address) >> 32 == 0x64FF9B << 64


@settings(deadline=None)
@given(st.ip_addresses(v=4), st.booleans())
def test_other_forms_of_an_address_are_blocked_too(address, private):
    if is_permitted(address, private=private):
        return
    number = int(address)
    for form in (
        0xFFFF << 32 | number,  # mapped
        number,  # compatible
        0x64FF9B << 96 | number,  # NAT64
        0x2002 << 112 | number << 80 | 1,  # 6to4
        0x2001 << 112 | (number ^ 0xFFFFFFFF),  # Teredo
        0x2606_4700 << 96 | 0x5EFE << 32 | number,  # ISATAP
    ):
        if form > 1:  # ::1 is its own
            assert not is_permitted(ip_address(form.to_bytes(16)), private=private)


@pytest.mark.parametrize(
    "text", ["", "localhost", "127.1", "2130706433", "0x7f000001", "1.2.3.4.5"]
)
def test_a_host_that_is_not_an_address_is_not_permitted(text):
    assert not AddressFilter(private=True).permits(text)


def test_no_socket_for_a_closed_address():
    gate = AddressFilter(private=False)
    for family, address in (
        (socket.AF_INET, ("127.0.0.1", 80)),
        (socket.AF_INET, ("169.254.169.254", 80)),
        (socket.AF_INET6, ("::ffff:127.0.0.1", 80, 0, 0)),
        (socket.AF_INET6, ("fe80::1", 80, 0, 2)),
    ):
        with pytest.raises(AddressBlocked):
            gate.open((family, socket.SOCK_STREAM, 6, "", address))
    gate.open((socket.AF_INET, socket.SOCK_STREAM, 6, "", ("8.8.8.8", 80))).close()


async def test_one_closed_address_spoils_the_name():
    gate = NamedGate({"a": [["8.8.8.8", "10.0.0.1"]], "b": [["8.8.8.8", "2606:4700::1"]]})
    with pytest.raises(AddressBlocked):
        await gate.resolve("a", 80)
    found = await gate.resolve("b", 80)
    assert [info[4][0] for info in found] == ["8.8.8.8", "2606:4700::1"]
    assert [info[0] for info in found] == [socket.AF_INET, socket.AF_INET6]
    await gate.close()


async def test_looks_names_up_beside_the_loop():
    seen, go = [], threading.Event()

    class Slow(AddressFilter):
        def look_up(self, host, port):
            seen.append(threading.current_thread())
            assert go.wait(10)
            return []

    gate = Slow(private=False)
    waiting = asyncio.ensure_future(gate.resolve("a", 80))
    while not seen:
        await asyncio.sleep(0.001)
    assert seen[0] is not threading.current_thread()
    go.set()
    assert await waiting == []
    await gate.close()


async def test_a_name_that_is_none_is_an_ordinary_failure():
    gate = AddressFilter(private=False)
    with pytest.raises(OSError, match="not a host name"):
        await gate.resolve("a" * 64 + ".test", 80)
    await gate.close()
