"""Limits, memory, the exit deadline and the ready file of a process."""

import resource
import subprocess
import sys
from pathlib import Path

import pytest

from triptych.checkpoint import packaged_folder
from triptych.errors import InvalidConfig
from triptych.runtime import process
from triptych.runtime.process import ready_marker

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


@pytest.fixture(autouse=True)
def unread():
    process._max_memory_maps.cache_clear()
    yield
    process._max_memory_maps.cache_clear()


def test_a_share_is_of_what_the_process_may_have():
    most, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    assert process.descriptor_share(0.25) == most // 4
    told = int(Path("/proc/sys/vm/max_map_count").read_text())
    assert process.memory_map_share(0.125) == told // 8


@pytest.mark.parametrize("answer", [OSError("hidden"), b"unlimited"])
def test_a_kernel_without_the_value_gives_the_default(monkeypatch, answer):
    def read(path):
        if isinstance(answer, OSError):
            raise answer
        return answer

    monkeypatch.setattr(Path, "read_bytes", read)
    assert process.memory_map_share(1) == process.DEFAULT_MEMORY_MAPS


CODE = """
import sys, threading
from triptych.runtime import process

def rss():
    return int(open("/proc/self/statm").read().split()[1]) * 4096

def work(barrier):
    for _ in range(3):
        blocks = [b"x" * (16 << 20)]
        barrier.wait()
        del blocks

if sys.argv[1] == "little":
    process.limit_allocator_cache()
before, barrier = rss(), threading.Barrier(4)
threads = [threading.Thread(target=work, args=(barrier,)) for _ in range(4)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
process.trim_allocator()
print(rss() - before)
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="glibc alone can be told")
@pytest.mark.parametrize("kept", ["little", "much"])
def test_what_threads_have_freed(kept):
    """``much`` shows that the allocator keeps it by itself, so that the other one can fail."""
    done = subprocess.run(
        [sys.executable, "-c", CODE, kept], capture_output=True, text=True, check=True
    )
    assert (int(done.stdout) < 16 << 20) is (kept == "little")


def test_it_is_there_only_while_ready(tmp_path):
    """Fails without the ``unlink`` before: a killed process would count as ready."""
    file = tmp_path / "ready"
    file.touch()  # of one that was killed
    with ready_marker(str(file)) as ready:
        assert not file.exists()
        ready()
        assert file.exists()
    assert not file.exists()


def test_none_is_created_without_a_name():
    with ready_marker("") as ready:
        ready()


def test_one_that_cannot_be_made_is_refused_at_once(tmp_path):
    with (
        pytest.raises(InvalidConfig, match="--ready-file"),
        ready_marker(str(tmp_path / "no" / "x")),
    ):
        pass
