"""Command lines, sizes and checks of containers, for Compose and Kubernetes alike."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Annotated, Any
from urllib.parse import urlsplit

import msgspec
from msgspec import Meta, Struct

from triptych import __version__
from triptych.config import NO_KEYS, Config, Setting, all_settings, to_flags
from triptych.errors import InvalidConfig
from triptych.host import is_loopback
from triptych.placement import refuse_devices
from triptych.topology import Role
from triptych.transfer.registry import SELECTABLE, TRANSPORTS

NATS_IMAGE = "nats:2-alpine"  # has a shell and wget, which Compose needs
NATS_PORT = 4222
NATS_STORE = "/data"
NATS_USER = "triptych"
NATS_HEALTHY = (8222, "/healthz?js-enabled-only=true")  # port and path
# The configuration of nats-server. The store is on disk, so that it survives a restart. The
# password is not on the command line, which everyone who lists processes sees.
NATS_CONF = f"""\
port: {NATS_PORT}
http_port: {NATS_HEALTHY[0]}
jetstream {{
  store_dir: "{NATS_STORE}"
}}
authorization {{
  user: "{NATS_USER}"
  password: $NATS_PASSWORD
}}
"""
SCRATCH = "/tmp"  # the only folder that a container may write to
READY_FILE = f"{SCRATCH}/ready"
USER = 10001  # of deploy/Containerfile
SHARED_GIB = 1  # /dev/shm, for third-party engines
LEAVE_SECONDS = 5  # after a stop is requested, until no requests are routed here
END_SECONDS = 10  # after the last request
GIB = 1 << 30
MOST_DECODERS = 8
DEFAULT = Config()
OF_JOINED = ("nats_credentials", "nats_ca", "nats_cert", "nats_key")
PATHS = (
    "model",
    "allowed_media_path",
    "worker_tls_cert",
    "worker_tls_key",
    "tls_cert",
    "tls_key",
    "keys_file",
    "transfer_folder",
    *OF_JOINED,
)
WHERE = {"frontend": "the frontend", "worker": "workers", "both": "frontend and workers"}


def _about(text: str, **checks: Any) -> Meta:
    return Meta(description=text, **checks)


class Containers(Struct, frozen=True, forbid_unknown_fields=True):
    """Settings of `triptych render` besides those of the server."""

    image: Annotated[
        str,
        _about("name of the image built from deploy/Containerfile", min_length=1),
    ] = f"triptych:{__version__}"  # without a tag Kubernetes asks a registry at each start
    name: Annotated[
        str,
        _about("prefix of all names", pattern="^[a-z]([a-z0-9-]{0,30}[a-z0-9])?$"),
    ] = "triptych"
    volume: Annotated[
        str,
        _about(
            "volume with the model, mounted at MODEL: a local folder (compose), or a "
            "PersistentVolumeClaim (kubernetes); default: the model is in the image"
        ),
    ] = ""
    cpus: Annotated[int, _about("CPUs of a worker", ge=1)] = 2
    memory: Annotated[int, _about("GiB of memory of a worker", ge=1)] = 8
    gpus: Annotated[
        int, _about("GPUs of a worker; -1: one with --device cuda, else none", ge=-1)
    ] = -1
    kubernetes_namespace: Annotated[
        str,
        _about(
            "namespace of the objects; default: that of kubectl",
            pattern="^([a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?)?$",
        ),
    ] = ""

    @classmethod
    def checked(cls, values: dict[str, Any]) -> Containers:
        try:
            return msgspec.convert(values, cls)
        except msgspec.ValidationError as error:
            what, _, place = str(error).partition(" - at `$.")
            flag = place.rstrip("`").replace("_", "-")
            raise InvalidConfig(f"--{flag}: {what[0].lower()}{what[1:]}") from None


def config_inside(config: Config, containers: Containers) -> Config:
    """The settings of the processes in the containers. Refuses what has no meaning there."""
    refuse_devices(config.devices, "each container")
    _check_image(config, containers)
    _check_paths(config, containers)
    _check_addresses(config)
    _check_access(config)
    cores = containers.cpus
    return msgspec.structs.replace(
        config,
        cpu_threads=config.cpu_threads or cores,
        decode_processes=config.decode_processes or min(MOST_DECODERS, max(1, cores - 1)),
        # Set on each command line, or without meaning in a container.
        host=DEFAULT.host,
        join=DEFAULT.join,
        launch=DEFAULT.launch,
        ray=DEFAULT.ray,
        **NO_KEYS,
    )


def _check_image(config: Config, containers: Containers) -> None:
    from triptych.engines.base import engine_kind  # this command alone needs it

    if engine_kind(config.engine).package and containers.image == Containers().image:
        raise InvalidConfig(
            f"--engine {config.engine} is not in {containers.image}, which has only the "
            "built-in engine: build an image with both (see docs/engines.md) and set --image"
        )
    if config.engine_python:
        raise InvalidConfig(
            "--engine-python applies to `triptych serve`: containers use the Python of --image"
        )


def _check_paths(config: Config, containers: Containers) -> None:
    for flag, path in _paths(config):
        if not path.startswith("/"):
            raise InvalidConfig(
                f"{_flag_name(flag)} '{path}' is a path inside the containers: it must begin with "
                "a slash, as in /models/NAME"
            )
    if containers.volume and not config.model:
        raise InvalidConfig(
            "--volume is mounted at the path of the model: set MODEL, as in /models/NAME"
        )
    if config.run_dir:
        raise InvalidConfig(
            "--run-dir has no meaning here: containers find each other on NATS (--join)"
        )
    transport = TRANSPORTS.get(config.transport)
    if transport is not None and not transport.between_hosts:
        others = ", ".join(name for name in SELECTABLE if TRANSPORTS[name].between_hosts)
        raise InvalidConfig(
            f"--transport {transport.name} is of one machine: containers share no memory. Say one "
            f"of auto, {others}."
        )
    for name in () if config.join else OF_JOINED:
        if getattr(config, name):
            raise InvalidConfig(
                f"--{name.replace('_', '-')} applies to a NATS that --join names: the rendered one "
                "has a password and no TLS"
            )


def _check_addresses(config: Config) -> None:
    for server in config.servers:
        if is_loopback(urlsplit(server).hostname or ""):
            raise InvalidConfig(
                f"--join {server} is loopback, which is each container itself: use the address by "
                "which containers reach that NATS"
            )
    if config.worker_host != DEFAULT.worker_host:
        raise InvalidConfig(
            f"--worker-host {config.worker_host} has no meaning here: each container uses its own "
            "address"
        )
    if not config.port:
        raise InvalidConfig("--port 0 means a random port: set a fixed one")


def _check_access(config: Config) -> None:
    """Check what needs no file of the containers."""
    from triptych.api.cors import cors_policy  # this command alone needs them
    from triptych.api.routes import public_paths

    cors_policy(config)
    public_paths(config.public_routes)
    if config.tls_key and not config.tls_cert:
        raise InvalidConfig("--tls-key needs the certificate: set --tls-cert")


def unmounted_comment(config: Config, containers: Containers) -> str:
    """A comment that lists the paths which the output does not mount."""
    lines = [
        f"# - {path!r} ({_flag_name(flag)}), in {WHERE[flag.of]}\n"
        for flag, path in _paths(config)
        if flag.path != ("model",) or not containers.volume
    ]
    head = "# Nothing below mounts these paths: mount them yourself, or have them in the image.\n"
    return head + "".join(lines) if lines else ""


def _paths(config: Config) -> Iterator[tuple[Setting, str]]:
    """The settings that are paths and are set."""
    for flag in all_settings():
        if flag.path[0] in PATHS and (path := getattr(config, flag.path[0])):
            yield flag, path


def _flag_name(flag: Setting) -> str:
    return "MODEL" if flag.path == ("model",) else flag.name


def gpus_of_container(config: Config, containers: Containers) -> int:
    return config.gpus if containers.gpus < 0 else containers.gpus


def worker_words(config: Config, role: Role, index: str, host: str, join: str) -> list[str]:
    """The arguments of ``triptych``; ``index`` and ``host`` may be variables."""
    own = [f"--role={role}", f"--index={index}", f"--ready-file={READY_FILE}"]
    return ["worker", *own, f"--join={join}", f"--worker-host={host}", *_common(config)]


def frontend_words(config: Config, host: str, join: str) -> list[str]:
    own = [f"--join={join}", "--host=0.0.0.0", f"--worker-host={host}"]
    return ["frontend", *own, *_common(config)]


def quote_for_nats(password: str) -> str:
    """The value of a variable in ``NATS_CONF``. nats-server parses it like the file, so without
    quotes 1234 would be a number and x#y would end at the comment."""
    return f"'{password}'"


def stop_seconds(config: Config) -> int:
    """From SIGTERM to SIGKILL."""
    return LEAVE_SECONDS + math.ceil(config.limits.drain_seconds) + END_SECONDS


def frontend_memory(config: Config, containers: Containers) -> int:
    """GiB: the sum of its limits and one; at least a worker's if it decodes media."""
    limits = config.limits
    held = limits.media_in_flight_bytes + limits.loaded_media_bytes + limits.upload_bytes
    own = 1 + math.ceil((held + config.cache.fetched) / GIB)
    return own if config.decode_at == "encoder" else max(own, containers.memory)


def _common(config: Config) -> list[str]:
    """All settings that are not defaults, with ``$`` escaped for Compose and Kubernetes."""
    return [word.replace("$", "$$") for word in to_flags(config)]
