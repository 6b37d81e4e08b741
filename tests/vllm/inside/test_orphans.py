"""A worker that is killed leaves no engine behind."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from tools import tiny

from contract.engines.panels import SECONDS

# A worker that loads its engine, names its processes and waits. Killed, it can't clean up.
WORKER = """
import os, sys, time
from contract.engines.kinds import _descendants
from triptych.config import Config
from triptych.engines.vllm.load import load
from triptych.topology import Role

if __name__ == "__main__":
    config = Config(model=sys.argv[1], engine="vllm", max_model_len=512, cpu_threads=1)
    loaded = load(config, Role("PD"), None, lambda what, share: None)
    print(*_descendants(os.getpid()), file=sys.stderr, flush=True)
    print("ready", file=sys.stderr, flush=True)
    time.sleep(600)
"""


@pytest.mark.timeout(900)
def test_an_engine_does_not_outlive_its_worker(tmp_path):
    script = tmp_path / "worker.py"
    script.write_text(WORKER)
    with subprocess.Popen(
        [sys.executable, str(script), str(tiny.ensure_checkpoint("qwen2_5_vl"))],
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
    ) as worker:
        assert worker.stderr is not None
        try:
            lines = []
            while not lines or lines[-1] not in ("ready\n", ""):
                lines.append(worker.stderr.readline())
        finally:
            worker.kill()
    assert lines[-1] == "ready\n", "".join(lines[-40:])
    engine = [int(pid) for pid in lines[-2].split()]
    assert len(engine) > 1
    deadline = time.monotonic() + SECONDS
    while left := [pid for pid in engine if lives(pid)]:
        assert time.monotonic() < deadline, left
        time.sleep(0.05)


def lives(pid: int) -> bool:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] not in "ZX"
