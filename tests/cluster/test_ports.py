"""F17: rubbish at every port that any arrangement opens, from one who does not know the secret."""

import contextlib
import os
import pickle
import socket
import struct
from pathlib import Path

import psutil
import pytest

from support import pictures
from support.promises import unharmed
from support.servers import serving
from support.streams import body, equal, streamed, whole
from triptych.runtime import frames
from triptych.runtime.frames import FrameKind, Hello

FAKE = ["--engine=fake", "--enable-multimodal", "--fake-decode", "--pattern=E/P/D"]
ARRANGEMENTS = {  # and how many ports there are beside the frontend's and one for each worker
    "tcp": ([], 0),
    "http-zmq": (["--request-plane=http", "--event-plane=zmq", "--routing=kv"], 2),
    "nixl": (["--transport=nixl", "--decode-at=frontend"], 4),
}


class Shot:
    """Unpickled, it would leave a mark."""

    def __init__(self, mark):
        self.mark = mark

    def __reduce__(self):
        return (Path.touch, (Path(self.mark),))


def rubbish(mark):
    """Of no protocol, and then as each begins which is spoken here."""
    shot = pickle.dumps(Shot(mark))
    hello = frames.frame(
        FrameKind.HELLO, frames.pack(Hello(frames.PROTOCOL_VERSION, "P-0", 1, bytes(32)))
    )
    upgrade = (
        b"GET /triptych HTTP/1.1\r\nHost: x\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
        b"Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\n\r\n"
    )
    message = b"\x82\xfe" + struct.pack(">H", len(shot)) + bytes(4) + shot  # masked with zeros
    posted = b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 5000\r\n\r\n"
    null, curve = (
        b"\xff" + bytes(8) + b"\x7f\x03\x01" + name.ljust(20, b"\0") + bytes(32)
        for name in (b"NULL", b"CURVE")
    )
    ucx = struct.pack("<Q", 0xCAFEBABE12345678)
    begun = [hello, upgrade, upgrade + message, posted, null, curve, ucx]
    return [
        os.urandom(4096),
        shot,
        bytes(65536),
        b"\xff\xff\xff\xff" + shot,
        struct.pack("<I", 1 << 31) + b"x" * 100,
        *(half for one in begun for half in (one[: len(one) // 2], one, one + shot)),
    ]


@pytest.fixture(params=ARRANGEMENTS)
def arranged(request, tmp_path):
    flags, more = ARRANGEMENTS[request.param]
    with serving(*FAKE, *flags) as server:
        yield server, more


def listening(server):
    """Addresses of the server and all that it started."""
    tree = psutil.Process(server.process.pid).children(recursive=True)
    return {
        connection.laddr
        for process in tree
        for connection in process.net_connections("tcp")
        if connection.status == psutil.CONN_LISTEN
    }


def test_f17_garbage_at_every_port(arranged, tmp_path):
    """Guards: the limits of a hello (frames.MAX_HELLO) and the proof of the secret; the list of
    addresses fails when a worker listens on 0.0.0.0."""
    server, more = arranged
    bodies = [body(server, i, 20, pictures.encoded(pictures.draw(i))) for i in range(8)]
    wanted = whole(streamed(server, bodies), 20)  # and now all ports are open
    ports = listening(server)
    assert {address.ip for address in ports} == {"127.0.0.1"}
    assert len(ports) >= 4 + more, ports
    mark = tmp_path / "ran"
    with unharmed(server), contextlib.ExitStack() as held:
        for address in ports:
            for data in rubbish(mark):
                with (
                    contextlib.suppress(ConnectionError),  # closed before it was all sent
                    socket.create_connection(address, timeout=60) as sent,
                ):
                    sent.sendall(data)
                    with contextlib.suppress(OSError):  # closed already
                        sent.shutdown(socket.SHUT_WR)
                    while sent.recv(4096):  # until it is closed
                        pass
            silent = held.enter_context(socket.create_connection(address))
            silent.sendall(b"\1")  # and stays
        equal(streamed(server, bodies), wanted)
        assert not mark.exists()
