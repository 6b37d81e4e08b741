"""Which packages a command needs. Checked before anything starts; imports none of them.

The wheel installs what a frontend needs. Engines, media and clusters are extras.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from typing import Literal

from msgspec import Struct

from triptych.config import Config
from triptych.errors import InvalidConfig, install_hint
from triptych.transfer.registry import TRANSPORTS

Command = Literal["serve", "frontend", "worker"]
MEDIA = ("numpy", "pillow", "av", "safetensors")
EXTRAS = {
    "torch": (*MEDIA, "torch", "transformers"),
    "media": MEDIA,
    "cluster": ("nats-py", "pyzmq"),
    "nixl": ("nixl-cu13",),
    "ray": ("ray",),
}
_MODULES = {  # where a package's module has another name
    "pillow": "PIL",
    "nats-py": "nats",
    "pyzmq": "zmq",
    "nixl-cu13": "nixl_cu13",
    "prometheus-client": "prometheus_client",
    "pyyaml": "yaml",
}


class Need(Struct, frozen=True):
    """Packages of an extra, and the setting that asks for them."""

    setting: str
    extra: str
    packages: tuple[str, ...]

    @property
    def missing(self) -> tuple[str, ...]:
        return tuple(name for name in self.packages if not is_installed(name))


def check_packages(config: Config, part: Command) -> None:
    """Refuse to start where packages are missing; the error names all of them."""
    unmet = [need for need in needs(config, part) if need.missing]
    if not unmet:
        return
    packages = ", ".join(dict.fromkeys(name for need in unmet for name in need.missing))
    settings = " and ".join(need.setting for need in unmet)
    extras = ",".join(dict.fromkeys(need.extra for need in unmet))
    verb = "needs" if len(unmet) == 1 else "need"
    raise InvalidConfig(
        f"{settings} {verb} packages that are missing ({packages}). {install_hint(extras)}"
    )


def needs(config: Config, part: Command) -> Iterator[Need]:
    works, fronts = part in ("serve", "worker"), part in ("serve", "frontend")
    if works and config.engine == "torch":
        yield Need("--engine torch", "torch", EXTRAS["torch"])
    if works and config.engine == "fake" and config.fake.decode:
        yield Need("--fake-decode", "torch", (*MEDIA, "torch"))
    if fronts and config.decode_at == "frontend":
        yield Need("--decode-at frontend", "torch", (*MEDIA, "torch"))
    if config.join:
        yield Need("--join", "cluster", ("nats-py",))
    if config.event_plane == "zmq":
        yield Need("--event-plane zmq", "cluster", ("pyzmq",))
    transport = TRANSPORTS.get(config.transport)
    if transport and transport.extra and (works or config.decode_at == "frontend"):
        extra = transport.extra
        yield Need(f"--transport {config.transport}", extra, EXTRAS[extra])
    if part == "serve" and config.launch == "ray":
        yield Need("--launch ray", "ray", EXTRAS["ray"])


def module_of(package: str) -> str:
    return _MODULES.get(package, package)


def is_installed(package: str) -> bool:
    """Whether its module can be found. `triptych doctor` tries to import it."""
    try:
        spec = importlib.util.find_spec(module_of(package))
    except ValueError:  # in sys.modules without a spec
        return True
    return spec is not None and spec.origin is not None  # a plain folder of that name has none
