"""A worker as an actor of Ray: what runs on the node that Ray has chosen.

The worker is a process of its own, so that an engine may have its own environment and so that
signals and exit codes mean what they mean elsewhere. It dies with its actor, and Ray starts that
again. This module needs no Ray where it is only imported.
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

Exit = tuple[int, list[str]]  # exit code and last words


class RayWorker:
    """``run`` and ``stop`` come in two threads. Nothing else does."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._process: subprocess.Popen[str] | None = None
        self._stopping = threading.Event()

    def __repr__(self) -> str:
        return self._name  # Ray has it in its dashboard, and before each line

    def run(self, settings: bytes, secrets: Mapping[str, str], role: str, index: int) -> Exit:
        """The worker, from its start to its end, told to stop or not.

        The kernel ties it to this thread, which stays here as long.
        """
        config = with_node_address(msgspec.json.decode(settings, type=Config))
        words: deque[str] = deque(maxlen=LAST_LINES)
        try:
            python = engine_python(config)
        except StartError as error:  # of this node; others may have what is missing
            return EXIT_START_ERROR, [str(error)]
        argv = [python, "-m", "triptych", "worker", "--role", role, "--index", str(index)]
        with self._spawn([*argv, *to_flags(config)], config, secrets) as process:
            relaying = threading.Thread(target=_relay, args=(process, words), daemon=True)
            relaying.start()
            code = process.wait()
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # what it started and left behind
            relaying.join(RELAY_SECONDS)
        return code, list(words)

    def stop(self) -> None:
        """Let the worker drain; ``run`` ends when it has."""
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
    """The settings of a worker on this node: others reach it by the node's address, if any do."""
    if not config.join or config.worker_host != Config().worker_host:
        return config
    import ray

    return msgspec.structs.replace(config, worker_host=ray.util.get_node_ip_address())


def _relay(process: subprocess.Popen[str], words: deque[str]) -> None:
    """What the worker says goes to Ray's logs."""
    assert process.stderr is not None
    for line in process.stderr:
        words.append(line.rstrip("\n"))
        print(line, end="", file=sys.stderr, flush=True)
