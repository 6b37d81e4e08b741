"""Starts and stops the servers that are measured, and keeps each on its cores.

A server is tied to whoever started it: it ends with that process, however that one ends.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from benchmarks.load import tree

ROOT = Path(__file__).parent.parent
VLLM_PYTHON = ROOT / ".venv-vllm" / "bin" / "python"  # made by tools/setup_vllm.sh
START_SECONDS = 300.0
STOP_SECONDS = 45.0


@dataclass(frozen=True)
class Server:
    port: int
    pid: int  # what was started; its children are the rest
    seconds: float = 0.0  # until it was ready

    @property
    def frontend(self) -> int:
        """The process that clients talk to."""
        return next((pid for pid in tree(self.pid) if "frontend" in _words(pid)), self.pid)


@contextmanager
def bare(step_ms: float = 0.0) -> Iterator[Server]:
    with _running(
        lambda port: ["benchmarks.bare_server", str(port), str(step_ms)], path=None
    ) as server:
        yield server


@contextmanager
def triptych(
    *flags: str, environment: Mapping[str, str] | None = None, python: str = sys.executable
) -> Iterator[Server]:
    with _running(
        lambda port: ["triptych", "serve", *flags, "--port", str(port)],
        path="/health",
        python=python,
        environment=environment,
    ) as server:
        yield server


@contextmanager
def vllm(model: str, *flags: str, environment: Mapping[str, str]) -> Iterator[Server]:
    """vLLM's own server. By its module: its command needs a package named as it is, and the build
    for CPUs has another name."""
    started = ["vllm.entrypoints.openai.api_server", "--model", model, "--host", "127.0.0.1"]
    with _running(
        lambda port: [*started, *flags, "--port", str(port)],
        path="/health",
        python=str(VLLM_PYTHON),
        environment=environment,
    ) as server:
        yield server


def vllm_version() -> str:
    """With torch's: both are of another environment than the rest of a result tells."""
    asked = "import torch, vllm; print('vllm', vllm.__version__, 'torch', torch.__version__)"
    done = subprocess.run([str(VLLM_PYTHON), "-c", asked], capture_output=True, text=True)
    return done.stdout.strip().rpartition("\n")[2]


def memory(pid: int) -> int:
    """Bytes of a process and all below it; what several share is counted once."""
    total = 0
    for member in tree(pid):
        try:
            lines = Path(f"/proc/{member}/smaps_rollup").read_text().splitlines()
        except OSError:
            continue
        total += sum(1024 * int(line.split()[1]) for line in lines if line.startswith("Pss:"))
    return total


def pin(pids: Sequence[int], cores: set[int]) -> None:
    """Keep processes, with every thread that they have now, on these cores."""
    for pid in pids:
        for thread in Path(f"/proc/{pid}/task").iterdir():
            os.sched_setaffinity(int(thread.name), cores)


def cores() -> tuple[int, set[int]]:
    """One core for the frontend, and the others for everything else."""
    first, *others = sorted(os.sched_getaffinity(0))
    return first, set(others) or {first}


@contextmanager
def _running(
    words: Callable[[int], list[str]],
    path: str | None,
    python: str = sys.executable,
    environment: Mapping[str, str] | None = None,
) -> Iterator[Server]:
    port, began = _free_port(), time.monotonic()
    leash = [sys.executable, "-m", "triptych.runtime.parent_death", str(os.getpid())]
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(
            [*leash, python, "-m", *words(port)],
            cwd=ROOT,
            env={**os.environ, **(environment or {})},
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            _await_ready(process, port, path)
            yield Server(port, process.pid, time.monotonic() - began)
        except RuntimeError:
            log.seek(0)
            sys.stderr.write(log.read().decode(errors="replace")[-4000:])
            raise
        finally:
            _stop(process)


def _await_ready(process: subprocess.Popen[bytes], port: int, path: str | None) -> None:
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise RuntimeError(f"{process.args!r} ended with {process.returncode}")
        try:
            if path is None:
                socket.create_connection(("127.0.0.1", port), timeout=1).close()
            else:
                urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=2).close()
        except (OSError, urllib.error.URLError):
            time.sleep(0.05)
        else:
            return
    raise RuntimeError(f"{process.args!r} was not ready after {START_SECONDS:.0f} s")


def _stop(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
    try:
        process.wait(STOP_SECONDS)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _words(pid: int) -> list[str]:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text().split("\0")
    except OSError:
        return []
