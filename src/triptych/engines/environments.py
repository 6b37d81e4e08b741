"""Finds the Python of an engine's workers: a third-party engine has its own environment.

Looks for packages without importing them.
"""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import triptych
from triptych.config import Config
from triptych.engines.base import ENGINES, EngineKind
from triptych.errors import InvalidConfig

START_TIMEOUT = 60.0  # seconds for an interpreter to start, on a cold disk
_FIND_MISSING = """
import importlib.util, sys
specs = {name: importlib.util.find_spec(name) for name in sys.argv[1:]}
print(*(name for name, spec in specs.items() if spec is None or spec.origin is None))
"""


def engine_python(config: Config) -> str:
    """The interpreter of the engine's workers; InvalidConfig if it lacks a package."""
    kind = ENGINES[config.engine]
    if not kind.package:
        _refuse_third_party_settings(config)
        return sys.executable
    if not config.engine_python:
        spec = importlib.util.find_spec(kind.package)
        if spec is not None and spec.origin is not None:  # a folder of that name has no origin
            return sys.executable
        beside = Path(f"{sys.prefix}-{config.engine}") / "bin" / "python"
        if not beside.exists():
            raise InvalidConfig(
                f"engine {config.engine} needs an environment with {kind.package}, and there is "
                f"none: {kind.setup}, or set --engine-python to its Python"
            )
        return _check_python(str(beside), kind)
    return _check_python(config.engine_python, kind)


def _refuse_third_party_settings(config: Config) -> None:
    """Refuse settings that apply to third-party engines only."""
    given = {
        "--engine-args": config.engine_args,
        "--engine-python": config.engine_python,
        "--encoder native": config.encoder == "native",
    }
    for flag, value in given.items():
        if value:
            raise InvalidConfig(f"{flag} applies to third-party engines, not to {config.engine}")


def _check_python(python: str, kind: EngineKind) -> str:
    try:
        found = subprocess.run(
            [python, "-c", _FIND_MISSING, kind.package, "triptych", "uvloop", "av"],
            capture_output=True,
            text=True,
            timeout=START_TIMEOUT,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise InvalidConfig(f"--engine-python {python} can't be run: {error}") from None
    if found.returncode:
        raise InvalidConfig(f"--engine-python {python} can't be run: {found.stderr.strip()}")
    if missing := found.stdout.split():
        engine = f". {kind.package}: {kind.setup}" if kind.package in missing else ""
        ours = f". Triptych's own parts: {python} -m pip install -e '{_source()}[media]'"
        hint = engine if missing == [kind.package] else engine + ours
        raise InvalidConfig(f"{python} lacks {', '.join(missing)}{hint}")
    return python


def _source() -> str:
    """Where pip installs this Triptych from: its checkout, if there is one."""
    checkout = Path(triptych.__file__).parents[2]
    return str(checkout) if (checkout / "pyproject.toml").exists() else "/path/to/triptych"
