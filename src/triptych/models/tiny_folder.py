"""Where the tiny random checkpoint of a family is kept: ``tiny`` makes it. Loads no torch."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

from triptych.checkpoint import packaged_folder
from triptych.models import FAMILIES

RECIPE_VERSION = 7  # of the recipe: another one makes another default folder
COPIED = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
# Packaged folders with the tokenizers of tiny checkpoints.
ASSETS = {name: entry.tokenizer for name, entry in FAMILIES.items() if entry.tokenizer}


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
