"""Servers that are started to be measured end with their parent process."""

import signal
import subprocess
import sys

import psutil
import pytest

from benchmarks.record import ROOT

START = """
import time
from benchmarks import servers
with servers.{server} as server:
    print(server.pid, flush=True)
    time.sleep(600)
"""


@pytest.mark.parametrize(
    ("server", "number"),
    [
        ("bare()", signal.SIGKILL),
        ("triptych('--engine', 'fake', '--pattern', 'E/PD')", signal.SIGTERM),
    ],
)
def test_no_process_outlives_its_parent(server, number):
    argv = [sys.executable, "-c", START.format(server=server)]
    with subprocess.Popen(argv, cwd=ROOT, stdout=subprocess.PIPE) as starter:
        try:
            first = psutil.Process(int(starter.stdout.readline()))
            started = [first, *first.children(recursive=True)]
        finally:
            starter.send_signal(number)
        starter.wait(30)
    _, alive = psutil.wait_procs(started, timeout=30)
    for process in alive:
        process.kill()
    assert alive == []
