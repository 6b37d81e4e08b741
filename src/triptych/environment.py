"""Settings from environment variables, as containers have them: ``TRIPTYCH_PATTERN=E/PD``.

An unknown TRIPTYCH_ name is an error, so that a mistyped one is noticed. Child processes get their
settings as flags: their environment, ``without_settings``, keeps only secrets and keys.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from typing import Any

from triptych.config import Setting, all_settings
from triptych.errors import InvalidConfig

PREFIX = "TRIPTYCH_"
CONFIG = "TRIPTYCH_CONFIG"  # the same as --config
NOT_SETTINGS = (
    frozenset(  # variables other than settings: secrets, the log level, and those of the tests
        PREFIX + name
        for name in (
            *("SECRET", "NATS_USER", "NATS_PASSWORD", "NATS_TOKEN", "LOG", "CONFIG"),
            *("ALL_PATTERNS", "LONG_FAULTS", "SCHEMAS", "SEED", "SKIP_VLLM"),
        )
    )
)
# Kubernetes sets variables for each Service. One named `triptych` gives TRIPTYCH_PORT=tcp://10...
_SERVICE_LINK = re.compile(r".*_(SERVICE_HOST|SERVICE_PORT(_.*)?|PORT_\d+_(TCP|UDP|SCTP)(_.*)?)")
_SERVICE_ADDRESS = re.compile(r"(tcp|udp|sctp)://.*")
_BOOLEANS = {"1": True, "true": True, "yes": True, "on": True} | {
    "0": False, "false": False, "no": False, "off": False,
}  # fmt: skip


def settings_of_environment(environ: Mapping[str, str]) -> dict[tuple[str, ...], Any]:
    """The settings in these variables. An empty variable counts as unset."""
    known = {flag.variable: flag for flag in all_settings()}
    given = {}
    for name, text in environ.items():
        if not name.startswith(PREFIX) or name in NOT_SETTINGS or _is_service_link(name, text):
            continue
        if name not in known:
            raise InvalidConfig(_unknown(name, [*known, *NOT_SETTINGS]))
        if text:
            given[known[name].path] = _value(known[name], text)
    return given


def without_settings(environ: Mapping[str, str]) -> dict[str, str]:
    """The environment of a process that gets its settings as flags."""
    names = {flag.variable for flag in all_settings()} | {CONFIG}
    return {name: value for name, value in environ.items() if name not in names}


def _is_service_link(name: str, text: str) -> bool:
    address = name.endswith("_PORT") and _SERVICE_ADDRESS.fullmatch(text)
    return bool(address or _SERVICE_LINK.fullmatch(name))


def _unknown(name: str, known: list[str]) -> str:
    without = [one.removeprefix(PREFIX) for one in known]
    near = difflib.get_close_matches(name.removeprefix(PREFIX), without, 1)
    hint = (
        f"Did you mean {PREFIX}{near[0]}?"
        if near
        else "`triptych serve --help-all` lists the settings."
    )
    return f"the environment sets {name}, but there is no such setting. {hint}"


def _value(flag: Setting, text: str) -> Any:
    if flag.type is bool:
        if text.lower() in _BOOLEANS:
            return _BOOLEANS[text.lower()]
        raise InvalidConfig(f"{flag.variable}={text}: expected true or false")
    if flag.type in (int, float):
        try:
            return flag.type(text)
        except ValueError:
            what = "a whole number" if flag.type is int else "a number"
            raise InvalidConfig(f"{flag.variable}={text}: expected {what}") from None
    return text
