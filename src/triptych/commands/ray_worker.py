"""A worker as a Ray actor, on the node that Ray has chosen.

The worker is a separate process, so that an engine may have its own environment, and signals and
exit codes mean the same as elsewhere. It dies with its actor, which Ray restarts. Importing this
module does not import Ray.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Mapping

import msgspec

from triptych.config import Config, to_flags
from triptych.engines.environments import engine_python
from triptych.environment import without_settings
from triptych.errors import StartError
from triptych.runtime.parent_death import EXIT_START_ERROR
from triptych.runtime.supervisor import LAST_LINES, RELAY_SECONDS

Exit = tuple[int, list[str]]  # exit code and the end of its log


class RayWorker:
    """Ray calls ``run`` and ``stop`` in two threads."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._process: subprocess.Popen[str] | None = None
        self._stopping = threading.Event()

    def __repr__(self) -> str:
        return self._name  # Ray shows it in its dashboard and before each log line

    def run(self, settings: bytes, secrets: Mapping[str, str], role: str, index: int) -> Exit:
        """Run the worker until it exits.

        The kernel ends it with this thread, which therefore waits here.
        """
        config = with_node_address(msgspec.json.decode(settings, type=Config))
        words: deque[str] = deque(maxlen=LAST_LINES)
        try:
            python = engine_python(config)
        except StartError as error:  # on this node; others may have the package
            return EXIT_START_ERROR, [str(error)]
        argv = [python, "-m", "triptych", "worker", "--role", role, "--index", str(index)]
        with self._spawn([*argv, *to_flags(config)], config, secrets) as process:
            relaying = threading.Thread(target=_relay, args=(process, words), daemon=True)
            relaying.start()
            code = process.wait()
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # its leftover children
            relaying.join(RELAY_SECONDS)
        return code, list(words)

    def stop(self) -> None:
        """Let the worker drain; ``run`` returns when it has."""
        self._stopping.set()
        if self._process is not None:
            self._process.terminate()

    def _spawn(
        self, argv: list[str], config: Config, secrets: Mapping[str, str]
    ) -> subprocess.Popen[str]:
        threads = {"OMP_NUM_THREADS": str(config.torch.threads)}
        self._process = subprocess.Popen(
            [sys.executable, "-m", "triptych.runtime.parent_death", str(os.getpid()), *argv],
            env=without_settings(os.environ) | threads | dict(secrets),
            stdin=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            process_group=0,
        )
        if self._stopping.is_set():
            self._process.terminate()
        return self._process


def with_node_address(config: Config) -> Config:
    """The settings with this node's address as --worker-host, if other nodes must reach it."""
    if not config.join or config.worker_host != Config().worker_host:
        return config
    import ray

    return msgspec.structs.replace(config, worker_host=ray.util.get_node_ip_address())


def _relay(process: subprocess.Popen[str], words: deque[str]) -> None:
    """Copy the worker's log to Ray's."""
    assert process.stderr is not None
    for line in process.stderr:
        words.append(line.rstrip("\n"))
        print(line, end="", file=sys.stderr, flush=True)
