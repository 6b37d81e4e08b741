"""Addresses to listen on: which port is free, how a URL is written, and why one cannot be had."""

from __future__ import annotations

import errno
import ipaddress
import socket

from triptych.errors import InvalidConfig


def free_port(host: str, port: int, flag: str = "--host") -> int:
    """The port to listen on (0: any free one); refused when it cannot be had."""
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except (OSError, UnicodeError) as error:
            raise cannot_listen(error, host, port, flag) from None
        bound: int = probe.getsockname()[1]
        return bound


def cannot_listen(
    error: OSError | UnicodeError, host: str, port: int, flag: str = "--host"
) -> InvalidConfig:
    """The error for the operator. ``flag`` is the one that gave the host."""
    code = error.errno if isinstance(error, OSError) else None
    if code == errno.EADDRINUSE:
        why, hint = "the port is taken", "Choose another with --port (0: any free one)."
    elif code == errno.EACCES:
        why, hint = "the port is not allowed", "Choose one above 1023 with --port."
    elif code in (None, errno.EADDRNOTAVAIL) or isinstance(error, socket.gaierror):
        why, hint = "this machine has no such address", f"Give one of its own with {flag}."
    else:
        why, hint = str(error), f"See {flag} and --port."
    return InvalidConfig(f"cannot listen on {authority(host, port)}: {why}. {hint}")


def authority(host: str, port: int) -> str:
    """``127.0.0.1:8000`` or ``[::1]:8000``: as it stands in a URL."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def address(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address:
    """Of a host by name, the first one."""
    [(_, _, _, _, found), *_] = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    return ipaddress.ip_address(found[0])
