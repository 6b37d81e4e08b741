"""The folder of a family's tiny random checkpoint. ``tiny`` makes it. Imports no torch."""

from __future__ import annotations

import hashlib
from pathlib import Path

from triptych.checkpoint import cache_folder, packaged_folder
from triptych.models import FAMILIES

RECIPE_VERSION = 7  # another recipe has another default folder
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")


def tiny_families() -> list[str]:
    """Model types that have a tiny checkpoint."""
    return sorted(name for name, entry in FAMILIES.items() if entry.tokenizer)


def tokenizer_folder(family: str) -> Path:
    """The packaged folder with the tokenizer of a family's tiny checkpoint."""
    return packaged_folder(FAMILIES[family].tokenizer)


def default_folder(family: str) -> Path:
    """Another recipe or another tokenizer has another folder."""
    digest = hashlib.sha256()
    for name in TOKENIZER_FILES:
        digest.update((tokenizer_folder(family) / name).read_bytes())
    return cache_folder() / f"tiny-{family}-v{RECIPE_VERSION}-{digest.hexdigest()[:6]}"


def is_complete_folder(folder: Path) -> bool:
    return (folder / "config.json").is_file()
