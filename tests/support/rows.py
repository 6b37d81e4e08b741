"""What must hold after every row of the table of bad inputs, asked of a real server.

A ``Watched`` server is attacked through its own methods, which store its answers; ``check`` then
compares it with before: its processes, its memory, its answers, what it holds.
"""

from __future__ import annotations

import asyncio
import base64
import itertools
import os
import re
import socket
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import psutil

from support.origin import Origin
from support.servers import Answer, TestServer, text_part

PATIENCE = 10  # seconds for an answer: twice what is promised, for a busy machine
GROWTH = 50 << 20  # bytes
PLACE = "messages[0].content[1]"  # of the part that ``Watched.ask`` is given
TOKENS = 8
MIMES = {"image": "image/png", "video": "video/mp4", "audio": "audio/wav"}
SECRETS = re.compile(
    r"\d+\.\d+\.\d+\.\d+|::|([0-9a-f]{1,4}:){3}|[\w\]]:\d{2,5}\b"  # addresses
    r"|/(proc|tmp|work|dev|etc|home|usr|root|var|sys|run)\b|\.py\b|\.test\b|localhost"
    r"|memfd|shm|triptych-media|psm_|0x[0-9a-f]{6}|Traceback|hidden"
)


def data_part(kind: str, data: bytes, mime: str = "") -> dict[str, Any]:
    url = f"data:{mime or MIMES[kind]};base64,{base64.b64encode(data).decode()}"
    return url_part(kind, url)


def url_part(kind: str, url: str) -> dict[str, Any]:
    return {"type": f"{kind}_url", f"{kind}_url": {"url": url}}


def embeds_part(kind: str, given: bytes | str) -> dict[str, Any]:
    """An embedding itself, or the URL of one."""
    value = base64.b64encode(given).decode() if isinstance(given, bytes) else {"url": given}
    return {"type": f"{kind}_embeds", f"{kind}_embeds": value}


class Watched:
    """``good`` is the content of a request that must always work."""

    def __init__(self, server: TestServer, good: Sequence[dict[str, Any]]) -> None:
        self.server = server
        self.name = server.model
        self.crashes = 0  # of decoding processes, that this row means to cause
        self._good = good
        self._salts = itertools.count()
        self._said: list[bytes] = []
        self._ids = self._good_ids()
        for _ in range(3):  # pools and caches grow to the size of the load
            assert self._good_ids() == self._ids
        server.wait(self._idle, what="idle at the start")
        self._pids, self._memory = self._processes(), self._resident()
        self._held = self._descriptors()
        self._crashed = self.counter("decode_crashes")

    # --- asking

    def post(self, content: Any, key: str = "", timeout: float = PATIENCE, **fields: Any) -> Answer:
        """A chat, whose content may also be whole messages. A hang is a TimeoutError."""
        turns = content if _is_turns(content) else [{"role": "user", "content": content}]
        body = {
            "model": self.name,
            "messages": turns,
            "max_tokens": TOKENS,
            "temperature": 0,
            "ignore_eos": True,
            "return_token_ids": True,
        }
        answer = self.server.request("/v1/chat/completions", body | fields, timeout, key)
        if answer.status != 200:
            self._said.append(answer.body)
        return answer

    def ask(self, part: dict[str, Any], **more: Any) -> Answer:
        return self.post([text_part("What is this:"), part, text_part("Tell me.")], **more)

    def ids(self, part: dict[str, Any], **more: Any) -> list[int]:
        """What is answered to a good part."""
        answer = self.ask(part, **more)
        assert answer.status == 200, answer.body
        return answer.json["choices"][0]["token_ids"]

    def cold(self, part: dict[str, Any], **more: Any) -> list[int]:
        """The same, with nothing from any cache."""
        return self.ids(part, cache_salt=self.salt(), **more)

    def salt(self) -> str:
        return f"salt {next(self._salts)}"

    def refused(self, part: dict[str, Any], code: str, **more: Any) -> str:
        return is_refusal(self.ask(part, **more), code)

    def all_refused(self, parts: Sequence[dict[str, Any]], code: str, timeout: float) -> None:
        """All at once."""
        with ThreadPoolExecutor(len(parts)) as pool:
            for answer in pool.map(lambda part: self.ask(part, timeout=timeout), parts):
                is_refusal(answer, code)

    def counter(self, name: str) -> float:
        return sum(w["counters"].get(name, 0) for w in self.server.cluster().values())

    # --- judging

    def check(self) -> None:
        """After a row. Whatever it finds, the next row is judged by itself."""
        said, self._said = self._said, []
        meant, self.crashes = self.crashes, 0
        before, crashed = self._pids, self._crashed
        assert self._good_ids() == self._ids
        self._pids, self._crashed = self._processes(), self.counter("decode_crashes")
        for body in said:
            found = SECRETS.search(body.decode())
            assert not found, (found, body)
        assert self._crashed - crashed == meant
        assert _without_decoding(self._pids) == _without_decoding(before)
        assert meant or self._pids == before
        for name, memory in self._resident().items():
            assert memory - self._memory[name] < GROWTH, name
        self.server.wait(self._idle, PATIENCE, "every block, ticket and segment is given back")
        self.server.wait(
            lambda: all(count <= self._held[n] for n, count in self._descriptors().items()),
            PATIENCE,
            f"no more descriptors than {self._held}",
        )

    def decoding(self) -> list[psutil.Process]:
        """The processes in which media are decoded."""
        workers = [psutil.Process(w["pid"]) for w in self.server.cluster().values()]
        return [
            child
            for worker in workers
            for child in worker.children()
            if "triptych.media.sandbox" in child.cmdline()
        ]

    def _good_ids(self) -> list[int]:
        """Through the whole of it: a new salt finds nothing in any cache."""
        answer = self.post([*self._good, text_part("Well?")], cache_salt=self.salt())
        assert answer.status == 200, answer.body
        return answer.json["choices"][0]["token_ids"]

    def _idle(self) -> bool:
        state = self.server.state()
        return not state["frontend"]["in_flight"] and all(
            w["kv_blocks_free"] == w["kv_blocks_total"]
            and not w["tickets"] + w["segments"] + w["queued"] + w["running"]
            for w in state["workers"]
        )

    def _processes(self) -> dict[str, int]:
        pids = {"supervisor": self.server.process.pid} | self.server.pids()
        return pids | {f"decode {i}": child.pid for i, child in enumerate(self.decoding())}

    def _resident(self) -> dict[str, int]:
        return {n: psutil.Process(pid).memory_info().rss for n, pid in self.server.pids().items()}

    def _descriptors(self) -> dict[str, int]:
        """Without those of cached embeddings, each of which has one."""
        counts = {n: len(os.listdir(f"/proc/{pid}/fd")) for n, pid in self.server.pids().items()}
        for name, worker in self.server.cluster().items():
            counts[name] -= int(worker["counters"].get("embedding_cache_items", 0))
        return counts


def _without_decoding(pids: dict[str, int]) -> dict[str, int]:
    return {name: pid for name, pid in pids.items() if not name.startswith("decode")}


def is_refusal(answer: Answer, code: str, param: str | None = PLACE, status: int = 400) -> str:
    """In OpenAI's shape; gives the message."""
    assert answer.status == status, answer.body
    error = answer.json["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert (error["code"], error["param"]) == (code, param), error
    assert error["type"] == "invalid_request_error"
    assert isinstance(error["message"], str)
    assert error["message"]
    return error["message"]


class Closed:
    """Listens on every loopback address, where no connection may come, and counts those that do."""

    def __init__(self) -> None:
        first = socket.create_server(("127.0.0.1", 0))
        self.port = first.getsockname()[1]
        self._sockets = [first]
        if socket.has_ipv6:
            self._sockets.append(socket.create_server(("::1", self.port), family=socket.AF_INET6))
        for listening in self._sockets:
            listening.setblocking(False)

    def came(self) -> int:
        count = 0
        for listening in self._sockets:
            while True:
                try:
                    listening.accept()[0].close()
                except BlockingIOError:
                    break
                count += 1
        return count

    def close(self) -> None:
        for listening in self._sockets:
            listening.close()


@contextmanager
def in_thread(origin: Origin) -> Iterator[Origin]:
    """A web server that goes on while a test waits for something else."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()

    def run(work: Any) -> None:
        asyncio.run_coroutine_threadsafe(work, loop).result(PATIENCE)

    try:
        run(origin.__aenter__())
        try:
            yield origin
        finally:
            run(origin.__aexit__())
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


def _is_turns(content: Any) -> bool:
    return isinstance(content, list) and any(isinstance(c, dict) and "role" in c for c in content)
