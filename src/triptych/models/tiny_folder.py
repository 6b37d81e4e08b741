"""Where the tiny random checkpoint of a family is kept: ``tiny`` makes it. Loads no torch."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

from triptych.checkpoint import packaged_folder

RECIPE_VERSION = 7  # of the recipe: another one makes another default folder
COPIED = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
ASSETS = {  # where the tokenizer of a family's tiny checkpoint ships
    "llama4": "llama4",
    "llava": "llava",
    "llava_next_video": "llava_next_video",
    "qwen2_5_omni": "qwen_omni",
    "qwen2_5_vl": "qwen",
    "qwen2_audio": "qwen_audio",
    "qwen2_vl": "qwen",
    "qwen3_vl": "qwen",
}


def cache_folder() -> Path:
    """The folder of all of them."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "triptych"


def default_folder(family: str) -> Path:
    """Another recipe or another tokenizer has another folder."""
    digest = hashlib.sha256()
    for name in COPIED:
        digest.update((packaged_folder(ASSETS[family]) / name).read_bytes())
    return cache_folder() / f"tiny-{family}-v{RECIPE_VERSION}-{digest.hexdigest()[:6]}"


def is_made(folder: Path) -> bool:
    return (folder / "config.json").is_file()
