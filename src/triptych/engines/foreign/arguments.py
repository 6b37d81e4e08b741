"""The words of ``--engine-args``."""

from __future__ import annotations

import shlex

from triptych.errors import InvalidConfig


def split(text: str) -> list[str]:
    try:
        return shlex.split(text)
    except ValueError as error:
        raise InvalidConfig(f"--engine-args can't be read: {error}") from None
