"""A real NATS server for tests: on loopback, with JetStream, restarted and frozen at will."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from triptych.host import free_port

START_SECONDS = 30.0


class NatsServer:
    """``store``: where its data outlive a restart; none: they are lost with each stop."""

    def __init__(self, home: Path, store: Path | None, port: int, extra: str) -> None:
        self.port = port
        self.url = f"nats://127.0.0.1:{port}"
        self._home = home
        self._store = store
        self._extra = extra
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Run, on the same port as ever, until it listens."""
        store = self._store or Path(tempfile.mkdtemp(dir=self._home))
        config = self._home / "nats.conf"
        config.write_text(
            f'listen: "127.0.0.1:{self.port}"\n'
            f'jetstream {{ store_dir: "{store}" }}\n{self._extra}\n'
        )
        program = Path(sys.executable).parent / "nats-server"
        with open(self._home / "log", "ab") as log:
            self._process = subprocess.Popen(
                [program, "-c", config], stdout=log, stderr=subprocess.STDOUT
            )
        end = time.monotonic() + START_SECONDS
        while not self._listens():
            assert self._process.poll() is None, self.log()
            assert time.monotonic() < end, self.log()
            time.sleep(0.02)

    def stop(self) -> None:
        """End it, at once and without a word to its clients."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def restart(self) -> None:
        self.stop()
        self.start()

    @contextmanager
    def frozen(self) -> Iterator[None]:
        """As behind a wall: connections stay, and nothing comes over them."""
        assert self._process is not None
        os.kill(self._process.pid, signal.SIGSTOP)
        try:
            yield
        finally:
            os.kill(self._process.pid, signal.SIGCONT)

    def log(self) -> str:
        return (self._home / "log").read_text()

    def _listens(self) -> bool:
        try:
            with socket.create_connection(("127.0.0.1", self.port), timeout=1) as connection:
                return connection.recv(4) == b"INFO"
        except OSError:
            return False


@contextmanager
def nats_server(
    *, store: Path | None = None, port: int | None = None, extra: str = ""
) -> Iterator[NatsServer]:
    """``extra``: more lines of its configuration, as for users or TLS."""
    home = Path(tempfile.mkdtemp(prefix="nats-"))
    server = NatsServer(home, store, port or free_port("127.0.0.1", 0), extra)
    try:
        server.start()
        yield server
    finally:
        server.stop()
        shutil.rmtree(home, ignore_errors=True)
