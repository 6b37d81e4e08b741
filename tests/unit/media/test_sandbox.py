"""The decoding process is locked down, in case a hostile file takes its decoder over."""

import asyncio
import os
import platform
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from support.decoding import RECIPES, children, item, pool, told
from triptych.config import Limits
from triptych.errors import InvalidMedia, MediaTooLarge
from triptych.media import decoder_process, lockdown, process_monitor

X86 = pytest.mark.skipif(platform.machine() != "x86_64", reason="call numbers of x86_64")


@pytest.fixture
async def decoding():
    decode_pool = pool()
    yield decode_pool
    await decode_pool.close()


@pytest.fixture
async def locked(decoding):
    await decoding.prepare(item("echo", 1))
    if lacking := decoding._processes._idle[0].lacking:
        pytest.skip(f"this kernel has no {lacking}")
    return decoding


async def test_nothing_leaves_the_sandbox(locked, tmp_path):
    own = tmp_path / "own"
    own.write_text("mine")
    outcome = told(await locked.prepare(item("break_out", str(tmp_path))))
    assert len(outcome) == 29
    assert set(outcome.values()) == {"EPERM", "EACCES"}, outcome
    assert own.read_text() == "mine"
    assert list(tmp_path.iterdir()) == [own]


async def test_torch_does_not_look_for_gpus_there(tmp_path, monkeypatch):
    """NVIDIA's bindings, which a torch for GPUs loads, write files in order to find libraries."""
    (tmp_path / "dill.py").write_text("")
    (tmp_path / "cuda").mkdir()
    (tmp_path / "cuda/bindings.py").write_text("")
    (tmp_path / "other.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    decode_pool = pool()
    try:
        assert told(await decode_pool.prepare(item("loads", "other")))
        assert not told(await decode_pool.prepare(item("loads", "cuda.bindings")))
        assert not told(await decode_pool.prepare(item("loads", "dill")))
    finally:
        await decode_pool.close()


@X86
async def test_nothing_leaves_the_sandbox_by_number(locked):
    outcome = told(await locked.prepare(item("break_out_by_number")))
    assert len(outcome) == 12
    assert set(outcome.values()) == {"EPERM"}, outcome


async def test_where_the_kernel_has_no_locks_the_limits_still_hold(tmp_path, caplog):
    """The other limits hold, and the log says once which lock is missing."""
    decode_pool = pool(processes=2, preparer="support.preparer_unlocked", decode_bytes=512 << 20)
    try:
        both = item("sleep", 0.2, 1), item("sleep", 0.2, 2)
        await asyncio.gather(*(decode_pool.prepare(one) for one in both))
        assert len(children()) == 2
        assert told(await decode_pool.prepare(item("descriptors")))[1] == "EMFILE"
        with pytest.raises(MediaTooLarge):
            await decode_pool.prepare(item("allocate", 600 << 20))
    finally:
        await decode_pool.close()
    lines = [record.getMessage() for record in caplog.records if "without" in record.getMessage()]
    assert len(lines) == 1
    assert "landlock" in lines[0]
    assert "seccomp" in lines[0]


async def test_it_starts_clean(decoding, monkeypatch):
    monkeypatch.setenv("TRIPTYCH_API_KEY", "secret")
    about = told(await decoding.prepare(item("about")))
    assert set(about["environment"]) <= {
        "PYTHONPATH",
        "PYTHONUTF8",
        "OMP_NUM_THREADS",
        "OPENBLAS_NUM_THREADS",
        "MKL_NUM_THREADS",
        "PILLOW_BLOCKS_MAX",
        "LD_LIBRARY_PATH",
        "LC_CTYPE",  # the interpreter's own
    }
    assert sorted(link.split(":")[0] for link in about["descriptors"].values() if link) == [
        "/dev/null",
        "/dev/null",
        "/dev/null",
        "socket",
    ]
    assert about["folder"] == "/"
    assert about["niceness"] >= lockdown.NICENESS
    assert about["core"] == [0, 0]
    assert int(about["killed_first"]) >= lockdown.OOM_SCORE_ADJ
    status = dict(line.split(":\t") for line in about["status"].splitlines())
    assert int(status["CapEff"], 16) == int(status["CapPrm"], 16) == 0
    assert status["NoNewPrivs"] == "1"


async def test_libraries_are_loaded_once_and_before_the_first_item(decoding):
    for turn in ("file", "embeds"):
        assert told(await decoding.prepare(item("loaded", form=turn))) == [RECIPES.revision]


async def test_descriptors_are_few(decoding):
    count, error = told(await decoding.prepare(item("descriptors")))
    assert error == "EMFILE"
    assert count < 64


async def test_memory_is_bounded():
    decode_pool = pool(decode_bytes=512 << 20)
    try:
        assert told(await decode_pool.prepare(item("allocate", 100 << 20))) == 100 << 20
        with pytest.raises(MediaTooLarge, match="512 MiB"):
            await decode_pool.prepare(item("allocate", 600 << 20))
        assert told(await decode_pool.prepare(item("echo", 1))) == 1
    finally:
        await decode_pool.close()


async def test_b44_cpu_time_is_bounded(caplog, monkeypatch):
    monkeypatch.setattr(decoder_process, "CLOCK_PER_CPU_SECOND", 1000)
    decode_pool = pool(decode_image_seconds=0.1)
    try:
        with pytest.raises(InvalidMedia, match=r"over 0\.1 seconds of CPU time"):
            await decode_pool.prepare(item("burn", 1000))
        assert decode_pool.counters["decode_crashes"] == 1  # it is not tried again
    finally:
        await decode_pool.close()
    assert "it took over 0.1 s of CPU time" in caplog.text  # before the kernel, which is late


def test_b44_each_kind_has_cpu_time_of_its_own():
    limits = Limits(decode_seconds=3, decode_image_seconds=1, decode_audio_seconds=2)
    kinds = [
        decoder_process.cpu_limit(item(kind=kind), limits) for kind in ("image", "audio", "video")
    ]
    assert kinds == [1, 2, 3]
    assert decoder_process.cpu_limit(item(form="embeds"), limits) == 3


async def test_cpu_time_is_bounded_by_the_kernel_too(caplog, monkeypatch):
    monkeypatch.setattr(process_monitor.ProcessMonitor, "__call__", lambda self: 60.0)
    decode_pool = pool(decode_image_seconds=0.1)
    try:
        with pytest.raises(InvalidMedia, match="CPU time"):
            await decode_pool.prepare(item("burn", 1000))
    finally:
        await decode_pool.close()
    assert "SIGXCPU" in caplog.text


async def test_cpu_time_is_counted_for_each_item_separately(decoding):
    await decoding.prepare(item("echo", 1))
    (pid,) = children()
    first, _ = resource.prlimit(pid, resource.RLIMIT_CPU)
    await decoding.prepare(item("burn", 1))
    await decoding.prepare(item("echo", 2))
    second, _ = resource.prlimit(pid, resource.RLIMIT_CPU)
    assert second > first


async def test_time_is_bounded_where_no_cpu_is_used(decoding, caplog, monkeypatch):
    await decoding.prepare(item("echo", 1))
    (pid,) = children()
    with monkeypatch.context() as patch:
        patch.setattr(decoder_process, "CLOCK_PER_CPU_SECOND", 0.01)
        with pytest.raises(InvalidMedia):
            await decoding.prepare(item("sleep", 1000))
    assert pid not in children()  # though the next one may be there already
    assert told(await decoding.prepare(item("echo", 1))) == 1
    assert "took too long" in caplog.text


ORPHANED = """
import asyncio
from support.decoding import item, pool, told

async def main():
    decoding = pool()
    print(told(await decoding.prepare(item("about")))["pid"], flush=True)
    await decoding.prepare(item("sleep", 1000))

asyncio.run(main())
"""


def test_it_dies_with_its_parent_in_the_midst_of_an_item():
    tests = str(Path(__file__).parents[2])
    parent = subprocess.Popen(
        [sys.executable, "-c", ORPHANED],
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": tests},
    )
    with parent:
        assert parent.stdout is not None
        orphan = psutil.Process(int(parent.stdout.readline()))
        time.sleep(0.3)  # it has its item by then; else it would end for another reason
        parent.send_signal(signal.SIGKILL)
        parent.wait()
    orphan.wait(timeout=10)
