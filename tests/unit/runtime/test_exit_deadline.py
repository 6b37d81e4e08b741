"""A process that has decided to end does so, though what it closes blocks for ever."""

import subprocess
import sys

import pytest

from triptych.checkpoint import packaged_folder

BLOCK = {  # ways of closing that never end
    "in Python": "threading.Event().wait()",
    "outside of Python, with its lock": "ctypes.PyDLL(None).sleep(60)",
}
ENGINE = """
from triptych.stages import process
from triptych.config import Config

async def serve(config, role, worker_id, secret, ready, ending):
    ending(4)
    threading.Event().wait()  # as an engine's close after a hang

process.run_worker, process.CLOSE_SECONDS = serve, 0.1
process.main(Config(sys.argv[1], "E/PD", run_dir=sys.argv[2]), "PD", "PD-0", "secret")
"""
FRONTEND = """
from triptych.api import process
from triptych.config import Config

async def stop(*_):
    os.kill(os.getpid(), signal.SIGTERM)

async def hang(*_):
    threading.Event().wait()

process._tell_missing, process.MediaLoader.close, process.CLOSE_SECONDS = stop, hang, 0.1
process.main(Config(sys.argv[1], "E/PD", run_dir=sys.argv[2], port=0), "secret")
"""


def run(code, *words):
    """A Python of its own, which must end by itself."""
    code = f"import ctypes, os, signal, sys, threading\n{code}"
    argv = [sys.executable, "-c", code, *map(str, words)]
    return subprocess.run(argv, capture_output=True, text=True, timeout=60, check=False)


@pytest.mark.parametrize(("blocked", "code"), [("in Python", 7), (list(BLOCK)[1], 1)])
def test_it_exits_in_time(blocked, code):
    """The second way says where it stood. Proved without the timer, and without faulthandler."""
    done = run(f"""\
from triptych.runtime import process
process.GIL_SECONDS = 0.3
process.exit_within(0.1, 7)
{BLOCK[blocked]}""")
    assert done.returncode == code, done.stderr
    assert ("could not close within 0.1 s" if code == 7 else 'File "<string>"') in done.stderr


@pytest.mark.parametrize(("process", "code"), [(ENGINE, 4), (FRONTEND, 0)], ids=["worker", "front"])
def test_a_worker_and_a_frontend_whose_closing_blocks_end_in_time(tmp_path, process, code):
    """Proved without the calls of ``exit_within``: both run on for ever."""
    done = run(process, packaged_folder("qwen"), tmp_path)
    assert "could not close within 0.1 s" in done.stderr, done.stderr
    assert done.returncode == code
