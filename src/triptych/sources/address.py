"""Which network addresses media may be fetched from, decided on the address that is connected to.

A name proves nothing: it can resolve to anything, and to something else a moment later. So
AddressFilter resolves names itself, refuses a name if any of its addresses is not permitted, and
creates the sockets itself: never one for an address that is not permitted.
"""

from __future__ import annotations

import socket
from collections.abc import Iterable
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address
from typing import Any

from triptych.runtime.concurrency import FairThreadPool

MAX_LOOKUPS = 64  # at once: libc waits long for a silent name server,
MAX_LOOKUPS_PER_TENANT = 16  # so one tenant must not delay the look-ups of others

IPAddress = IPv4Address | IPv6Address
AddrInfo = tuple[int | socket.AddressFamily, int | socket.SocketKind, int, str, tuple[Any, ...]]


def _v4(*networks: str) -> tuple[IPv4Network, ...]:
    return tuple(map(IPv4Network, networks))


def _v6(*networks: str) -> tuple[IPv6Network, ...]:
    return tuple(map(IPv6Network, networks))


# No media server has these addresses, not even in a private network: metadata services
# (168.63.129.16 looks public and is not), link-local, multicast, this host on this network.
_NEVER_V4 = _v4("169.254.0.0/16", "168.63.129.16/32", "192.0.0.192/32", "100.100.100.200/32")
_NEVER_V4 += _v4("224.0.0.0/4", "0.0.0.0/8", "255.255.255.255/32")
_NEVER_V6 = _v6("fd00:ec2::254/128", "fd20:ce::254/128", "fe80::/10", "ff00::/8", "::/128")

# Private, loopback, shared (CGNAT), for documentation, for benchmarks, reserved.
_PRIVATE_V4 = _v4("10.0.0.0/8", "100.64.0.0/10", "127.0.0.0/8", "172.16.0.0/12", "192.0.0.0/24")
_PRIVATE_V4 += _v4("192.0.2.0/24", "192.88.99.0/24", "192.168.0.0/16", "198.18.0.0/15")
_PRIVATE_V4 += _v4("198.51.100.0/24", "203.0.113.0/24", "240.0.0.0/4")

# Of IPv6 only 2000::/3 is given out, and of that these are for something else: protocols
# (Teredo), documentation, 6to4.
_GIVEN_OUT_V6 = IPv6Network("2000::/3")
_PRIVATE_V6 = _v6("2001::/23", "2001:db8::/32", "2002::/16", "3fff::/20")

_NAT64 = IPv6Network("64:ff9b::/96")
_COMPATIBLE = IPv6Network("::/96")
_ISATAP = (0x00005EFE, 0x02005EFE)  # third quarter of an address that ends with an IPv4 one


class AddressBlocked(PermissionError):
    """Media may not be fetched from the address. An OSError, so that asyncio passes it on."""


def is_permitted(address: IPAddress, *, private: bool) -> bool:
    """Whether a socket may be opened to it; ``private``: also in private networks."""
    if isinstance(address, IPv4Address):
        if _within(address, _NEVER_V4):
            return False
        return private or not _within(address, _PRIVATE_V4)
    if not all(is_permitted(inner, private=private) for inner in _inside(address)):
        return False
    if address.ipv4_mapped or address in _NAT64:
        return True  # as permitted as its IPv4 address
    if address.scope_id or _within(address, _NEVER_V6):
        return False
    return private or (address in _GIVEN_OUT_V6 and not _within(address, _PRIVATE_V6))


def _within(address: IPAddress, networks: Iterable[IPv4Network | IPv6Network]) -> bool:
    return any(address in network for network in networks)


def _inside(address: IPv6Address) -> list[IPv4Address]:
    """The IPv4 addresses that an IPv6 address embeds, in any known form."""
    number = int(address)
    last = IPv4Address(number & 0xFFFFFFFF)
    found = []
    if address.ipv4_mapped or address in _NAT64 or (number >> 32) & 0xFFFFFFFF in _ISATAP:
        found.append(last)
    if address in _COMPATIBLE and number > 1:  # :: and ::1 are addresses of their own
        found.append(last)
    if address.sixtofour:
        found.append(address.sixtofour)
    if address.teredo:
        found.extend(address.teredo)
    return found


class AddressFilter:
    """Resolves names and opens sockets, to permitted addresses only."""

    def __init__(self, *, private: bool) -> None:
        self._private = private
        self._lookups = FairThreadPool("lookup", MAX_LOOKUPS, MAX_LOOKUPS_PER_TENANT)

    def permits(self, address: str) -> bool:
        try:
            return is_permitted(ip_address(address), private=self._private)
        except ValueError:
            return False

    def look_up(self, host: str, port: int) -> list[AddrInfo]:
        """All addresses of a name. Blocks: runs in a thread."""
        return list(socket.getaddrinfo(host, port, type=socket.SOCK_STREAM))

    async def resolve(self, host: str, port: int, tenant: str = "") -> list[AddrInfo]:
        """The addresses of a name. Raises AddressBlocked if any one is not permitted."""
        infos = _numeric(host, port)
        if infos is None:
            try:
                infos = await self._lookups.run(tenant, self.look_up, host, port)
            except UnicodeError:
                raise OSError("not a host name") from None
        if any(not self.permits(str(info[4][0])) for info in infos):
            raise AddressBlocked
        return infos

    def open(self, info: AddrInfo) -> socket.socket:
        """A socket for an address. Checks it again, whatever was checked before."""
        family, kind, protocol, _, address = info
        if not self.permits(str(address[0])):
            raise AddressBlocked
        return socket.socket(family, kind, protocol)

    async def close(self) -> None:
        self._lookups.close()


def _numeric(host: str, port: int) -> list[AddrInfo] | None:
    """The address of a host that is not a name; None: it has to be looked up."""
    try:
        address = ip_address(host)
    except ValueError:
        return None
    if address.version == 4:
        return [(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP, "", (host, port))]
    return [(socket.AF_INET6, socket.SOCK_STREAM, socket.IPPROTO_TCP, "", (host, port, 0, 0))]
