"""Which machine this is, as far as memory goes, and which of its interfaces has an address."""

from __future__ import annotations

import fcntl
import functools
import hashlib
import ipaddress
import os
import socket
import struct
from pathlib import Path

from triptych.errors import InvalidConfig

_SIOCGIFADDR, _SIOCGIFNETMASK = 0x8915, 0x891B


@functools.cache
def identity() -> str:
    """Equal in two processes only if each can open the other's memory.

    Of the boot and of the namespaces of processes and of networks: containers of one machine are
    hosts of their own.
    """
    digest = hashlib.sha256(Path("/proc/sys/kernel/random/boot_id").read_bytes())
    for kind in ("pid", "net"):
        about = os.stat(f"/proc/self/ns/{kind}")
        digest.update(f" {about.st_dev}:{about.st_ino}".encode())
    return digest.hexdigest()[:32]


def interface_of(host: str) -> str | None:
    """The interface that has this address; None where the address stands for all of them."""
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][4][0]
    except OSError as error:
        raise InvalidConfig(f"--worker-host {host}: {error.strerror}") from None
    address = ipaddress.ip_address(str(found).partition("%")[0])
    if address.is_unspecified:
        return None
    name = _with_ipv6(address) if address.version == 6 else _with_ipv4(address)
    if name is None:
        raise InvalidConfig(f"--worker-host {host}: no interface of this machine has that address")
    return name


def _with_ipv4(address: ipaddress.IPv4Address) -> str | None:
    """The interface of that address, or else of its subnet: its address may be the second one."""
    networks = {name: network for name in _names() if (network := _ipv4(name)) is not None}
    exact = [name for name, network in networks.items() if network.ip == address]
    near = [name for name, network in networks.items() if address in network.network]
    return next(iter(exact + near), None)


def _names() -> list[str]:
    return [name for _, name in socket.if_nameindex()]


def _ipv4(name: str) -> ipaddress.IPv4Interface | None:
    ask = struct.pack("256s", name.encode()[:15])
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        try:
            address, mask = (
                socket.inet_ntoa(fcntl.ioctl(any_socket, what, ask)[20:24])
                for what in (_SIOCGIFADDR, _SIOCGIFNETMASK)
            )
        except OSError:  # it has none
            return None
    return ipaddress.IPv4Interface(f"{address}/{mask}")


def _with_ipv6(address: ipaddress.IPv6Address) -> str | None:
    file = Path("/proc/net/if_inet6")
    lines = file.read_text().splitlines() if file.exists() else []
    found = (line.split() for line in lines)
    return next((words[5] for words in found if int(words[0], 16) == int(address)), None)
