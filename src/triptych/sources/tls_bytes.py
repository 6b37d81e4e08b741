"""Bounds what a TLS server may send besides the bytes that a reader gets: a handshake that never
ends, key updates, tickets. The event loop's TLS handles these by itself and tells nobody, so the
kernel's own count of a socket's bytes is looked at while the connection is open.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import socket
import struct
import sys
import termios

TLS_OVERHEAD_BYTES = (
    1 << 20
)  # bytes of handshake, tickets and records' frames, and those not yet decrypted,
TLS_OVERHEAD_SHARE = 8  # and one for each so many bytes of content
TLS_CHECK_SECONDS = 0.02
_BYTES_RECEIVED = struct.Struct("@128xQ")  # in Linux's struct tcp_info


class TlsByteLimit:
    """Cuts the connection when its TLS takes more than that. Started before the handshake."""

    def __init__(self, sock: socket.socket) -> None:
        self.content = 0  # bytes that the reader got
        self._sock = sock
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        self._look()

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _look(self) -> None:
        try:
            received = _read(self._sock)
        except OSError:
            return  # it is closed
        if received - self.content > TLS_OVERHEAD_BYTES + self.content // TLS_OVERHEAD_SHARE:
            with contextlib.suppress(OSError):
                self._sock.shutdown(socket.SHUT_RDWR)
            return
        self._timer = self._loop.call_later(TLS_CHECK_SECONDS, self._look)


def _read(sock: socket.socket) -> int:
    """Bytes that were read from the socket so far: those that arrived but the waiting ones."""
    info = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _BYTES_RECEIVED.size)
    waiting = int.from_bytes(fcntl.ioctl(sock, termios.FIONREAD, bytes(4)), sys.byteorder)
    return (
        int(_BYTES_RECEIVED.unpack(info)[0]) - waiting if len(info) == _BYTES_RECEIVED.size else 0
    )
