"""Sends many large pictures at once, each over a connection of its own and each another file.

    python -m benchmarks.flood PORT MODEL FOLDER COUNT

FOLDER has base64 of JPEG files without their first two bytes, which ``write`` made; a comment in
front makes as many different files of them as are wanted. The bytes go from the disk to the socket
without passing through here, so that sending costs little. Prints JSON.
"""

from __future__ import annotations

import base64
import json
import os
import selectors
import socket
import struct
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

from benchmarks import pictures

GIVE_UP_SECONDS = 400.0


def write(folder: Path, count: int) -> None:
    for number in range(count):
        (folder / f"{number}").write_bytes(base64.b64encode(pictures.large(number)[2:]))


class Request:
    def __init__(self, port: int, model: str, tail: Path, number: int) -> None:
        self._file = os.open(tail, os.O_RDONLY)
        self._size = os.fstat(self._file).st_size
        start = b"\xff\xd8\xff\xfe" + struct.pack(">H", 14) + b"%012d" % number  # 18 bytes
        body = json.dumps(
            {
                "model": model,
                "messages": [
                    {
                        "role": "user",
                        "content": [
                            {"type": "text", "text": "What is it?"},
                            {"type": "image_url", "image_url": {"url": "@"}},
                        ],
                    }
                ],
                "max_tokens": 4,
                "temperature": 0,
                "ignore_eos": True,
            }
        ).encode()
        before, after = body.split(b"@")
        before += b"data:image/jpeg;base64," + base64.b64encode(start)
        head = (
            b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\nauthorization: Bearer none\r\n"
            b"content-type: application/json\r\nconnection: close\r\ncontent-length: %d\r\n\r\n"
            % (len(before) + self._size + len(after))
        )
        self._pieces = [head + before, after]
        self._sent = 0
        self.answer = b""
        self.begun = time.monotonic()
        self.seconds = 0.0
        self.socket = socket.create_connection(("127.0.0.1", port))
        self.socket.setblocking(False)

    def send(self) -> bool:
        """As much as goes now; False when all has gone."""
        try:
            if len(self._pieces) == 2:
                self._pieces[0] = self._pieces[0][self.socket.send(self._pieces[0]) :]
                if not self._pieces[0]:
                    del self._pieces[0]
            elif self._sent < self._size:
                left = self._size - self._sent
                self._sent += os.sendfile(self.socket.fileno(), self._file, self._sent, left)
            else:
                self._pieces[0] = self._pieces[0][self.socket.send(self._pieces[0]) :]
                if not self._pieces[0]:
                    os.close(self._file)
                    return False
        except BlockingIOError:
            pass
        return True

    def receive(self) -> bool:
        """False at the end of the answer."""
        try:
            piece = self.socket.recv(65536)
        except BlockingIOError:
            return True
        except ConnectionError:
            piece = b""
        self.answer += piece
        if not piece:
            self.seconds = time.monotonic() - self.begun
            self.socket.close()
        return bool(piece)

    @property
    def status(self) -> int:
        words = self.answer.split(b" ", 2)
        return int(words[1]) if len(words) == 3 else 0


def flood(port: int, model: str, folder: Path, count: int) -> dict[str, Any]:
    tails = sorted(folder.iterdir())
    begun = time.monotonic()
    requests = [Request(port, model, tails[i % len(tails)], i) for i in range(count)]
    selector = selectors.DefaultSelector()
    for request in requests:
        selector.register(request.socket, selectors.EVENT_READ | selectors.EVENT_WRITE, request)
    while selector.get_map() and time.monotonic() - begun < GIVE_UP_SECONDS:
        for key, events in selector.select(1.0):
            request: Request = key.data
            try:
                if events & selectors.EVENT_WRITE and not request.send():
                    selector.modify(request.socket, selectors.EVENT_READ, request)
            except ConnectionError:  # refused in the middle: the answer says why
                selector.modify(request.socket, selectors.EVENT_READ, request)
            if events & selectors.EVENT_READ:
                socket_ = request.socket
                if not request.receive():
                    selector.unregister(socket_)
    statuses = Counter(request.status for request in requests)
    return {
        "seconds": round(time.monotonic() - begun, 2),
        "statuses": dict(statuses),
        "answered_s": sorted(round(request.seconds, 2) for request in requests),
        "refusals": [
            request.answer[-300:].decode() for request in requests if request.status != 200
        ][:3],
    }


if __name__ == "__main__":
    _, port, model, folder, count = sys.argv
    os.nice(19)  # other machines would do this work
    print(json.dumps(flood(int(port), model, Path(folder), int(count))))
