"""What it takes to run SGLang on a CPU: options, environment, and stand-ins for what needs a GPU.

The stand-ins are in tests/sglang/harness. None of this is the adapter's.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from support.servers import TestServer, serving

HARNESS = Path(__file__).parents[1] / "sglang" / "harness"
ENVIRONMENT = {
    "SGLANG_USE_CPU_ENGINE": "1",
    "PYTHONPATH": str(HARNESS),
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    # A request whose prefill is gone waits for it so many seconds.
    "SGLANG_DISAGGREGATION_WAITING_TIMEOUT": "20",
}
START_SECONDS = 900  # engines import for a minute each, on a machine that may be busy
ARGUMENTS = " ".join(
    (
        "--attention-backend torch_native --mm-attention-backend sdpa --sampling-backend pytorch",
        "--grammar-backend none --disable-cuda-graph --disable-overlap-schedule --sleep-on-idle",
        "--disaggregation-decode-retraction-backup cpu_tensor",
        "--max-total-tokens 16384 --max-running-requests 32",
    )
)


def enter() -> None:
    """Have SGLang run on the CPU in this process and those below it."""
    os.environ.update(ENVIRONMENT)
    if str(HARNESS) not in sys.path:
        sys.path.insert(0, str(HARNESS))


@contextmanager
def served(folder: Path, pattern: str) -> Iterator[TestServer]:
    """A real ``triptych serve`` of SGLang."""
    flags = [
        str(folder),
        "--engine=sglang",
        f"--pattern={pattern}",
        f"--engine-args={ARGUMENTS}",
        "--dtype=float32",
        "--enable-multimodal",
    ]
    with serving(*flags, env=ENVIRONMENT, ready=False) as server:
        server.wait(server.complete, START_SECONDS, "every worker is ready")
        yield server
