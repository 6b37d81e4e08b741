"""Where the tiny random checkpoint of a family is kept: ``tiny`` makes it. Loads no torch."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

from triptych.model import packaged

VERSION = 1  # of the recipe: another one makes another default folder
COPIED = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
ASSETS = {"qwen2_5_vl": "qwen", "llava": "llava"}  # where a family's tokenizer ships


def cache() -> Path:
    """The folder of all of them."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "triptych"


def default_folder(family: str) -> Path:
    """Another recipe or another tokenizer has another folder."""
    digest = hashlib.sha256()
    for name in COPIED:
        digest.update((packaged(ASSETS[family]) / name).read_bytes())
    return cache() / f"tiny-{family}-v{VERSION}-{digest.hexdigest()[:6]}"


def is_made(folder: Path) -> bool:
    return (folder / "config.json").is_file()
