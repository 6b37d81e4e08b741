"""A real ``triptych serve`` for tests: started as a user starts it, stopped by a signal."""

from __future__ import annotations

import base64
import json
import os
import signal
import ssl
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from triptych.host import free_port
from triptych.topology import Topology

START_SECONDS = 180
# As in tests/conftest.py. Other engines than torch read it too, and a flag overrides it.
THREADS = {"TRIPTYCH_CPU_THREADS": "1"}
ADMIN = "of the operator"  # a key, where a server has keys at all


class Answer:
    def __init__(self, status: int, body: bytes, headers: Any) -> None:
        self.status = status
        self.body = body
        self.headers = headers

    @property
    def json(self) -> Any:
        return json.loads(self.body)


class TestServer:
    __test__ = False

    def __init__(
        self,
        process: subprocess.Popen[bytes],
        port: int,
        log: str,
        key: str = "none",
        context: ssl.SSLContext | None = None,
    ) -> None:
        self.process = process
        self.key = key
        self.admin_key = ADMIN
        self.port = port
        self.context = context  # None: plain HTTP
        self.url = f"{'http' if context is None else 'https'}://127.0.0.1:{port}"
        self.log = log

    def request(
        self, path: str, body: Any = None, timeout: float = 60, key: str | None = None
    ) -> Answer:
        """``key``: another than the server's first."""
        data = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
        headers = {"Authorization": f"Bearer {key or self.key}"}
        if data is not None:
            headers["Content-Type"] = "application/json"
        asking = urllib.request.Request(self.url + path, data, headers)
        try:
            with urllib.request.urlopen(asking, timeout=timeout, context=self.context) as got:
                return Answer(got.status, got.read(), got.headers)
        except urllib.error.HTTPError as error:
            return Answer(error.code, error.read(), error.headers)

    @property
    def model(self) -> str:
        return self.request("/v1/models").json["data"][0]["id"]

    def chat(self, content: Any, **fields: Any) -> Answer:
        messages = content if _is_turns(content) else [{"role": "user", "content": content}]
        body = {"model": self.model, "messages": messages, "temperature": 0} | fields
        return self.request("/v1/chat/completions", body)

    def state(self) -> dict[str, Any]:
        return self.request("/cluster", key=self.admin_key).json

    def cluster(self) -> dict[str, dict[str, Any]]:
        """Workers by id."""
        return {w["id"]: w for w in self.state()["workers"]}

    def pids(self) -> dict[str, int]:
        """Of frontend and workers, by name. A worker that is too busy to answer is left out."""
        state = self.state()
        workers = {w["id"]: w["pid"] for w in state["workers"]}
        return {"frontend": state["frontend"]["pid"]} | workers

    def complete(self) -> bool:
        """Not one worker of each role, but all."""
        if not self.healthy():
            return False
        state = self.state()
        wanted = sum(group.count for group in Topology.parse(state["topology"]).groups)
        return len(state["workers"]) == wanted

    def healthy(self) -> bool:
        return self.says_ok("/health")

    def live(self) -> bool:
        return self.says_ok("/live")

    def says_ok(self, path: str) -> bool:
        try:
            return self.request(path, timeout=5).status == 200
        except (urllib.error.URLError, ConnectionError, TimeoutError):
            return False

    def wait(self, condition: Callable[[], bool], seconds: float = 30, what: str = "") -> None:
        """Until the condition holds; a test fails with ``what`` if it never does."""
        end = time.monotonic() + seconds
        while not condition():
            assert self.process.poll() is None, f"the server ended:\n{self.tail()}"
            assert time.monotonic() < end, f"never came true: {what}\n{self.tail()}"
            time.sleep(0.05)

    def kill(self, worker: str, number: int = signal.SIGKILL) -> int:
        self.wait(lambda: worker in self.cluster(), what=f"{worker} answers")
        pid: int = self.cluster()[worker]["pid"]
        os.kill(pid, number)
        return pid

    def tail(self) -> str:
        with open(self.log) as log:
            return log.read()[-6000:]


@contextmanager
def serving(
    *flags: str,
    env: dict[str, str] | None = None,
    ready: bool = True,
    start_seconds: float = START_SECONDS,
    context: ssl.SSLContext | None = None,
    python: str = sys.executable,
) -> Iterator[TestServer]:
    port = free_port("127.0.0.1", 0)
    argv = [python, "-m", "triptych", "serve", *flags, f"--port={port}"]
    if env and "TRIPTYCH_API_KEY" in env:
        env = {"TRIPTYCH_ADMIN_KEY": ADMIN} | env
    with tempfile.NamedTemporaryFile("w+", suffix=".log") as log:
        process = subprocess.Popen(argv, stderr=log, env=os.environ | THREADS | (env or {}))
        key = (env or {}).get("TRIPTYCH_API_KEY", "none").partition(",")[0]
        server = TestServer(process, port, log.name, key, context)
        try:
            if ready:
                server.wait(server.complete, start_seconds, "every worker is ready")
            yield server
        finally:
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)
            try:
                process.wait(timeout=60)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
                raise


def image_part(data: bytes, mime: str = "image/png") -> dict[str, Any]:
    url = f"data:{mime};base64,{base64.b64encode(data).decode()}"
    return {"type": "image_url", "image_url": {"url": url}}


def text_part(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text}


def _is_turns(content: Any) -> bool:
    return isinstance(content, list) and bool(content) and "role" in content[0]
