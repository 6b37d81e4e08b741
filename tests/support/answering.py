"""A server with prepared answers, in a thread of the test's process."""

from __future__ import annotations

import json
import ssl
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

MODELS = {"object": "list", "data": [{"id": "stub", "object": "model"}]}
TIMING = b": server-timing: fetch;dur=0.500, prefill;dur=2.000\n\n"


def chunk(text: str, finish: str | None = None) -> bytes:
    choice = {"index": 0, "delta": {"content": text}, "finish_reason": finish}
    return event({"choices": [choice], "usage": None})


def event(content: Any) -> bytes:
    return b"data: " + json.dumps(content).encode() + b"\n\n"


USAGE = event({"choices": [], "usage": {"prompt_tokens": 5, "completion_tokens": 2}})
DONE = b"data: [DONE]\n\n"
ANSWER = [chunk("Two "), chunk("circles.", "stop"), USAGE, TIMING, DONE]


class Answering:
    """What to say (``status`` and ``pieces``), and what was received."""

    def __init__(self) -> None:
        self.health = 200
        self.told: Any = {"status": "ok"}  # under /health
        self.status = 200
        self.pieces: Any = ANSWER  # of a stream, or the whole answer
        self.cut = False  # leave without the end of the body
        self.models: Any = MODELS
        self.bodies: list[Any] = []
        self.keys: list[str | None] = []
        self.url = ""
        self.on_post: Callable[[Any], None] = lambda body: None  # before the answer


@contextmanager
def answering(context: ssl.SSLContext | None = None) -> Iterator[Answering]:
    """``context``: with TLS."""
    state = Answering()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            state.keys.append(self.headers["Authorization"])
            told = state.models if self.path == "/v1/models" else state.told
            self._whole(200 if self.path == "/v1/models" else state.health, told)

        def do_POST(self) -> None:
            state.bodies.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            state.on_post(state.bodies[-1])
            if state.status != 200:
                self._whole(state.status, state.pieces)
                return
            self.send_response(200)
            self.send_header("Transfer-Encoding", "chunked")
            self.end_headers()
            for piece in state.pieces:
                self.wfile.write(b"%x\r\n%b\r\n" % (len(piece), piece))
            if state.cut:
                self.close_connection = True
            else:
                self.wfile.write(b"0\r\n\r\n")

        def _whole(self, status: int, told: Any) -> None:
            body = told if isinstance(told, bytes) else json.dumps(told).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    class Server(ThreadingHTTPServer):
        def handle_error(self, *_: object) -> None:
            """Clients may leave before the end."""

    server = Server(("127.0.0.1", 0), Handler)
    state.url = f"http://127.0.0.1:{server.server_port}"
    if context is not None:
        server.socket = context.wrap_socket(server.socket, server_side=True)
        state.url = state.url.replace("http", "https", 1)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield state
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
