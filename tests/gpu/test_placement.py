"""Workers of one GPU divide its memory: E/P/D starts there and answers right without options."""

from __future__ import annotations

import importlib.util
import subprocess
import sys

import pytest

from support.gpus import REAL
from support.servers import serving
from triptych.checkpoint import packaged_folder
from triptych.commands.launch import DEMO
from triptych.runtime.gpus import visible_gpus

pytestmark = [
    pytest.mark.skipif(REAL is None, reason="there is no GPU"),
    pytest.mark.timeout(540),
]
ENGINES = ["torch", "vllm"]
NEEDS = {
    "torch": True,
    "vllm": importlib.util.find_spec("vllm") is not None,
}


def test_the_driver_lists_what_there_is() -> None:
    assert REAL is not None
    found = visible_gpus(free=True).found
    assert found
    assert found[REAL.number].memory == REAL.memory
    assert 0 < found[REAL.number].free <= REAL.memory


@pytest.mark.parametrize("engine", ENGINES)
def test_e_p_d_on_one_gpu_answers_right(engine: str) -> None:
    if not NEEDS[engine]:
        pytest.skip(f"{engine} is not installed")
    words = ["demo", "--engine", engine, "--pattern", "E/P/D", "--devices"]
    words.append("E=cuda:0,P=cuda:0,D=cuda:0")  # also where there are more
    done = subprocess.run([sys.executable, "-m", "triptych", *words], timeout=530)
    assert done.returncode == 0  # every answer is right


def test_every_worker_says_where_it_is_and_some_memory_is_left() -> None:
    words = ["--pattern=E/P/D", "--enable-multimodal", "--devices=E=cpu,P=cuda:0,D=cuda:0"]
    with serving(str(packaged_folder(DEMO)), *words) as server:
        devices = {name: worker["device"] for name, worker in server.cluster().items()}
        found = visible_gpus(free=True).found
    assert devices == {"E-0": "cpu", "P-0": "cuda:0", "D-0": "cuda:0"}
    assert found
    assert found[0].free > 0.05 * found[0].memory
