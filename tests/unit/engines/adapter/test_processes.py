"""What killed processes had mapped by name is gone with them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

from triptych.engines.adapter.processes import EngineProcesses

HOLD = """
import subprocess, sys, time
from multiprocessing import resource_tracker, shared_memory
resource_tracker.register = lambda *_: None
memory = shared_memory.SharedMemory(create=True, size=4096)
print(memory.name, flush=True)
if sys.argv[1] == "parent":
    subprocess.Popen([sys.executable, *sys.orig_argv[1:-1], "child"])
time.sleep(60)
"""


def start() -> tuple[subprocess.Popen[str], list[Path]]:
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, "parent"], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    with process.stdout as said:
        return process, [Path("/dev/shm", said.readline().strip()) for _ in range(2)]


def test_all_below_are_killed_and_their_names_removed():
    process, names = start()
    processes = EngineProcesses([process.pid])
    assert all(name.exists() for name in names)
    processes.kill()
    assert process.wait(10) == -9
    assert not any(name.exists() for name in names)


def test_what_was_noted_goes_though_they_are_gone_already():
    process, names = start()
    processes = EngineProcesses([process.pid])
    for pid in reversed(processes._living()):
        os.kill(pid, signal.SIGKILL)
    process.wait()
    assert all(name.exists() for name in names)
    processes.kill()
    assert not any(name.exists() for name in names)


def test_what_others_have_mapped_stays():
    process, names = start()
    other, theirs = start()
    EngineProcesses([process.pid]).kill()
    process.wait()
    assert all(name.exists() for name in theirs)
    EngineProcesses([other.pid]).kill()
    other.wait()
    assert not any(name.exists() for name in (*names, *theirs))


def test_a_process_that_reuses_a_pid_is_not_killed():
    gone, names = start()
    other, theirs = start()
    processes = EngineProcesses([gone.pid])
    processes._roots = {other.pid: processes._roots[gone.pid] + 1}  # as if ids had come round
    processes.kill()
    assert not any(name.exists() for name in names)
    assert all(name.exists() for name in theirs)
    assert other.poll() is None
    for process in (gone, other):
        EngineProcesses([process.pid]).kill()
        process.wait()
