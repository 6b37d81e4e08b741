"""A folder of this process's own, for what vLLM's processes and ours pass each other by name.

It lies in the server's run directory, which goes with the server. What a worker that was killed
left behind goes when the next one makes its own.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path

FOLDER_PREFIX = "vllm-"


def make_private_folder(run_dir: str) -> Path:
    """A new one. Whoever makes it removes it."""
    place = Path(run_dir or tempfile.gettempdir())
    for other in place.glob(f"{FOLDER_PREFIX}*-*"):
        owner = other.name.removeprefix(FOLDER_PREFIX).partition("-")[0]
        if owner.isdigit() and not os.path.exists(f"/proc/{owner}"):
            shutil.rmtree(other, ignore_errors=True)
    return Path(tempfile.mkdtemp(prefix=f"{FOLDER_PREFIX}{os.getpid()}-", dir=place))
