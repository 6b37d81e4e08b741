"""Which Python an engine's workers run in: an engine that brings its own libraries has its own.

Looks for packages and imports none of them.
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

START_TIMEOUT = 60.0  # for an interpreter to start, on a cold disk
_LOOK = """
import importlib.util, sys
specs = {name: importlib.util.find_spec(name) for name in sys.argv[1:]}
print(*(name for name, spec in specs.items() if spec is None or spec.origin is None))
"""


def engine_python(config: Config) -> str:
    """The interpreter of the engine's workers; refused where it has not what they need."""
    kind = ENGINES[config.engine]
    if not kind.package:
        _refuse_foreign(config)
        return sys.executable
    if not config.engine_python:
        spec = importlib.util.find_spec(kind.package)
        if spec is not None and spec.origin is not None:  # a mere folder of that name has none
            return sys.executable
        beside = Path(f"{sys.prefix}-{config.engine}") / "bin" / "python"
        if not beside.exists():
            raise InvalidConfig(
                f"engine {config.engine} runs in an environment that has {kind.package}, and "
                f"there is none: {kind.setup}, or name its Python by --engine-python"
            )
        return _checked(str(beside), kind)
    return _checked(config.engine_python, kind)


def _refuse_foreign(config: Config) -> None:
    """What only an engine of others would heed."""
    given = {
        "--engine-args": config.engine_args,
        "--engine-python": config.engine_python,
        "--encoder native": config.encoder == "native",
    }
    for flag, value in given.items():
        if value:
            raise InvalidConfig(f"{flag} is for engines of others, not for {config.engine}")


def _checked(python: str, kind: EngineKind) -> str:
    try:
        looked = subprocess.run(
            [python, "-c", _LOOK, kind.package, "triptych", "uvloop", "av"],
            capture_output=True,
            text=True,
            timeout=START_TIMEOUT,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise InvalidConfig(f"--engine-python {python} can't be run: {error}") from None
    if looked.returncode:
        raise InvalidConfig(f"--engine-python {python} can't be run: {looked.stderr.strip()}")
    if missing := looked.stdout.split():
        engine = f". {kind.package}: {kind.setup}" if kind.package in missing else ""
        ours = f". Triptych's own parts: {python} -m pip install -e '{_source()}[media]'"
        hint = engine if missing == [kind.package] else engine + ours
        raise InvalidConfig(f"{python} lacks {', '.join(missing)}{hint}")
    return python


def _source() -> str:
    """What pip is given to install this Triptych: its checkout, where there is one."""
    checkout = Path(triptych.__file__).parents[2]
    return str(checkout) if (checkout / "pyproject.toml").exists() else "/path/to/triptych"
