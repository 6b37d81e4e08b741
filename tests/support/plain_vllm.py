"""What plain vLLM answers to the requests of the tests: asked once for each family."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from tools import tiny

from support import families
from support.families import Asked
from support.plain_requests import item, plain
from triptych.config import Config
from triptych.engines.environments import engine_python
from triptych.messages import MediaKind

COUNT = 16
ONLY: dict[str, tuple[MediaKind, ...]] = {"llava_next_video": ("video",)}  # what vLLM's model takes
MOST = {"llava_next_video": 1}  # items that it takes in one prompt
FRAMES = {"llava_next_video": 8}  # that the model looks at, of however many


@dataclass(frozen=True)
class Measured:
    prompt: list[int]
    ids: list[int]
    logprobs: list[float]


@cache
def requests(family: str) -> tuple[Asked, ...]:
    most = MOST.get(family, COUNT)
    asked = families.mixed(family, 10 * COUNT, slow=True, only=ONLY.get(family, ()))
    fit = [one for one in asked if len(one.media) <= most and _is_seen_whole(family, one)]
    return tuple(fit[:COUNT])


def _is_seen_whole(family: str, asked: Asked) -> bool:
    """Where a model looks at so many frames, the clip must have just these."""
    wanted = FRAMES.get(family)
    return wanted is None or all(item(shown)["shape"][0] == wanted for shown in asked.media)


@cache
def measured(family: str) -> tuple[Measured, ...]:
    asked = {
        "folder": str(tiny.ensure_checkpoint(family)),
        "kinds": ONLY.get(family) or families.kinds(family),
        "tokens": families.TOKENS,
        "requests": [plain(one) for one in requests(family)],
    }
    python = engine_python(Config(engine="vllm"))
    script = Path(__file__).with_name("plain_vllm_run.py")
    done = subprocess.run(
        [python, str(script)], input=json.dumps(asked), capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return tuple(Measured(**one) for one in json.loads(done.stdout))


def main(family: str) -> None:
    """Compare plain vLLM with plain transformers."""
    for asked, got in zip(requests(family), measured(family), strict=True):
        want = families.expected(family, asked, got.prompt)
        print([m.kind for m in asked.media], want.ids == got.ids, min(want.gaps))


if __name__ == "__main__":
    main(sys.argv[1])
