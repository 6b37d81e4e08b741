"""What SGLang in one piece answers to the requests of the tests: for clips, a patched one."""

from __future__ import annotations

import json
import os
import subprocess
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from tools import tiny

from support import families, sglang_cpu
from support.families import Asked
from support.plain_requests import plain
from triptych.config import Config
from triptych.engines.environments import engine_python

FAMILY = "qwen2_5_vl"
COUNT = 16
SCRIPT = Path(__file__).parents[1] / "sglang" / "aggregated.py"


@dataclass(frozen=True)
class Measured:
    prompt: int  # tokens
    ids: list[int]
    logprobs: list[float]


@cache
def requests() -> tuple[Asked, ...]:
    """Pictures and clips, alone, several and mixed over turns, and words alone."""
    return families.mixed(FAMILY, COUNT, slow=True)


@cache
def measured() -> tuple[Measured, ...]:
    """By an SGLang that gets a clip's rate and looks at its moments one by one."""
    asked = {
        "folder": str(tiny.ensure_checkpoint(FAMILY)),
        "arguments": sglang_cpu.ARGUMENTS,
        "tokens": families.TOKENS,
        "requests": [plain(one) for one in requests()],
    }
    done = subprocess.run(
        [engine_python(Config(engine="sglang")), str(SCRIPT)],
        input=json.dumps(asked),
        env=os.environ | sglang_cpu.ENVIRONMENT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return tuple(Measured(**one) for one in json.loads(done.stdout))
