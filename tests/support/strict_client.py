"""A client of HTTP/1.1 that checks every byte of framing: bytes in, responses out, no socket.

Anything that a response must not have raises ``Broken``: a status line where none is due, a header
that is missing or stands twice, a chunk whose size is wrong, bytes behind the end.
"""

from __future__ import annotations

import json
import re
from collections import deque
from dataclasses import dataclass, field
from typing import Any

_STATUS = re.compile(rb"HTTP/1\.1 ([1-5]\d\d) ([A-Za-z '-]+)")
_HEADER = re.compile(rb"([a-z][a-z0-9-]*): ([\x20-\x7e]+)")
_SIZE = re.compile(rb"[1-9a-f][0-9a-f]*|0")
_ID = re.compile(r"(req-|chatcmpl-|cmpl-)[0-9a-f]{24}")
CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"


class Broken(AssertionError):
    """The server wrote what no strict client can read."""


@dataclass
class Stream:
    """What the events of one streamed answer say, by choice."""

    texts: dict[int, str] = field(default_factory=dict)
    ids: dict[int, list[int]] = field(default_factory=dict)
    finishes: dict[int, str] = field(default_factory=dict)
    prompt_ids: list[int] | None = None
    usage: dict[str, Any] | None = None
    error: dict[str, Any] | None = None
    done: bool = False


@dataclass
class Response:
    method: str
    status: int
    headers: dict[str, str]
    body: bytes = b""
    interim: int = 0  # 1xx answers before it
    whole: bool = False

    @property
    def closes(self) -> bool:
        return self.headers.get("connection") == "close"

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    def stream(self) -> Stream:
        """The events, each checked: order, ids, one role, nothing behind a finish or [DONE]."""
        found, id = Stream(), self.headers["x-request-id"]
        if not self.body.endswith(b"\n\n"):
            raise Broken(f"the last event has no end: {self.body[-80:]!r}")
        for event in self.body.decode()[:-2].split("\n\n"):
            if event.startswith(":"):
                continue
            if not event.startswith("data: ") or "\n" in event:
                raise Broken(f"no event: {event!r}")
            if found.done or found.error is not None:
                raise Broken(f"an event behind the last: {event!r}")
            _event(found, id, event.removeprefix("data: "))
        if not found.done and found.error is None:
            raise Broken(f"a stream without an end: {self.body[-80:]!r}")
        return found


def _event(found: Stream, id: str, data: str) -> None:
    if data == "[DONE]":
        found.done = True
        return
    event = json.loads(data)
    if "error" in event:
        found.error = event["error"]
        return
    if event["id"] != id:
        raise Broken(f"an event of {event['id']} in the answer {id}")
    found.usage = event.get("usage") or found.usage
    found.prompt_ids = event.get("prompt_token_ids") or found.prompt_ids
    for choice in event["choices"]:
        found.prompt_ids = choice.get("prompt_token_ids") or found.prompt_ids
        _choice(found, choice)


def _choice(found: Stream, choice: dict[str, Any]) -> None:
    index = choice["index"]
    if index in found.finishes:
        raise Broken(f"choice {index} goes on behind its finish")
    delta = choice.get("delta", {})
    if "delta" in choice and ("role" in delta) is (index in found.texts):
        raise Broken(f"choice {index} must say its role first, and once: {choice}")
    text = delta.get("content", "") if "delta" in choice else choice["text"]
    found.texts[index] = found.texts.get(index, "") + text
    found.ids.setdefault(index, []).extend(choice.get("token_ids") or [])
    if choice["finish_reason"] is not None:
        found.finishes[index] = choice["finish_reason"]


class Responses:
    """The responses of one connection. ``expect`` one for each request that is sent."""

    def __init__(self) -> None:
        self._methods: deque[str] = deque()
        self._data = bytearray()
        self._interim = 0
        self._current: Response | None = None  # whose body is coming
        self._left = -1  # bytes of a body of declared length; -1: chunked; -2: until the end
        self._ready: list[Response] = []
        self.closed = False  # the last response said that the connection closes

    @property
    def due(self) -> int:
        """Responses that have not come whole."""
        return len(self._methods) + (self._current is not None)

    def expect(self, method: str) -> None:
        self._methods.append(method)

    def feed(self, data: bytes) -> None:
        self._data += data
        while self._data and self._step():
            pass

    def take(self) -> list[Response]:
        ready, self._ready = self._ready, []
        return ready

    def end(self, cut: bool = False) -> None:
        """The server has closed. ``cut``: it may have done so anywhere."""
        if self._current is not None and self._left == -2:
            self._complete(self._current)
        if not cut and (self._current is not None or self._data):
            raise Broken(f"closed amid a response: {self._current} {bytes(self._data[:80])!r}")

    def _step(self) -> bool:
        """Read one part of a response; whether there was a whole one."""
        if self._current is None:
            return self._head()
        if self._left == -1:
            return self._chunk(self._current)
        if self._left == -2:
            self._current.body += bytes(self._data)
            self._data.clear()
            return False
        if len(self._data) < self._left:
            return False
        self._current.body = bytes(self._data[: self._left])
        del self._data[: self._left]
        self._complete(self._current)
        return True

    def _head(self) -> bool:
        if not b"HTTP/1.1 ".startswith(bytes(self._data[:9])):
            raise Broken(f"no status line: {bytes(self._data[:80])!r}")
        if not self._methods or self.closed:
            raise Broken(f"bytes that nobody asked for: {bytes(self._data[:80])!r}")
        end = self._data.find(b"\r\n\r\n")
        if end < 0:
            return False
        lines = bytes(self._data[:end]).split(b"\r\n")
        del self._data[: end + 4]
        status = _status(lines[0])
        if status == 100:
            if lines[1:]:
                raise Broken(f"headers in an interim answer: {lines}")
            self._interim += 1
            return True
        self._open(Response(self._methods.popleft(), status, _headers(lines[1:])))
        return True

    def _open(self, response: Response) -> None:
        response.interim, self._interim = self._interim, 0
        headers = response.headers
        if not _ID.fullmatch(headers.get("x-request-id", "")):
            raise Broken(f"no request id: {headers}")
        if "content-type" not in headers:
            raise Broken(f"no content type: {headers}")
        self.closed = response.closes
        length, coding = headers.get("content-length"), headers.get("transfer-encoding")
        if length is not None:
            if coding is not None or not length.isdigit() or (length[0] == "0" and length != "0"):
                raise Broken(f"the length is not clear: {headers}")
            self._left = 0 if response.method == "HEAD" else int(length)
        elif coding == "chunked":
            self._left = -1
        elif coding is None and response.closes:
            self._left = -2
        else:
            raise Broken(f"the length is not clear: {headers}")
        self._current = response
        if self._left == 0:
            self._complete(response)

    def _chunk(self, response: Response) -> bool:
        end = self._data.find(b"\r\n")
        if end < 0:
            if len(self._data) > 16:
                raise Broken(f"no chunk size: {bytes(self._data[:80])!r}")
            return False
        line = bytes(self._data[:end])
        if not _SIZE.fullmatch(line):
            raise Broken(f"no chunk size: {line!r}")
        size = int(line, 16)
        whole = end + 2 + size + 2
        if len(self._data) < whole:
            return False
        if self._data[whole - 2 : whole] != b"\r\n":
            raise Broken(f"a chunk is not of its size: {bytes(self._data[:80])!r}")
        response.body += bytes(self._data[end + 2 : whole - 2])
        del self._data[:whole]
        if not size:
            self._complete(response)
        return True

    def _complete(self, response: Response) -> None:
        response.whole = True
        self._ready.append(response)
        self._current = None


def _status(line: bytes) -> int:
    match = _STATUS.fullmatch(line)
    if match is None:
        raise Broken(f"no status line: {line!r}")
    return int(match[1])


def _headers(lines: list[bytes]) -> dict[str, str]:
    found: dict[str, str] = {}
    for line in lines:
        match = _HEADER.fullmatch(line)
        if match is None or (name := match[1].decode()) in found:
            raise Broken(f"no header, or one that stands twice: {line!r}")
        found[name] = match[2].decode()
    return found
