"""What a container of a server runs and needs, wherever it stands.

Knows the command lines and the sizes, and neither Compose nor Kubernetes.
"""

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

NATS_IMAGE = "nats:2-alpine"  # with a shell and wget, which Compose needs there
NATS_PORT = 4222
NATS_STORE = "/data"
NATS_USER = "triptych"
NATS_HEALTHY = (8222, "/healthz?js-enabled-only=true")  # port and path
# What nats-server reads. The store is on disk, so that a restart forgets nothing. The password is
# no word of a command line, which whoever lists processes sees.
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
SCRATCH = "/tmp"  # all that a container may write to
READY_FILE = f"{SCRATCH}/ready"
USER = 10001  # of deploy/Containerfile
SHARED_GIB = 1  # /dev/shm, which third-party engines use between their own processes
LEAVE_SECONDS = 5  # after a stop is asked, so that nobody is sent here any more
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
    "transfer_folder",
    *OF_JOINED,
)
WHERE = {"frontend": "the frontend", "worker": "workers", "both": "frontend and workers"}


def _about(text: str, **checks: Any) -> Meta:
    return Meta(description=text, **checks)


class Containers(Struct, frozen=True, forbid_unknown_fields=True):
    """What the settings of a server do not say."""

    image: Annotated[
        str,
        _about("what was built of deploy/Containerfile, as it is called there", min_length=1),
    ] = f"triptych:{__version__}"  # a tag: Kubernetes asks a registry for each start without one
    name: Annotated[
        str,
        _about("before the names of all that is made", pattern="^[a-z]([a-z0-9-]{0,30}[a-z0-9])?$"),
    ] = "triptych"
    volume: Annotated[
        str,
        _about(
            "what holds the model, seen by containers at MODEL: a folder here (compose), or a "
            "PersistentVolumeClaim (kubernetes); none: it is in the image"
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
            "where objects are made; none: the namespace that they are applied to",
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
    """The settings as the processes in the containers get them; refused where they could not."""
    refuse_devices(config.devices, "each container")
    _check_image(config, containers)
    _check_paths(config, containers)
    _check_addresses(config)
    cores = containers.cpus
    torch = msgspec.structs.replace(config.torch, threads=config.torch.threads or cores)
    return msgspec.structs.replace(
        config,
        torch=torch,
        decode_processes=config.decode_processes or min(MOST_DECODERS, max(1, cores - 1)),
        # What each command line says for itself, or what is none of a container's business.
        host=DEFAULT.host,
        join=DEFAULT.join,
        launch=DEFAULT.launch,
        ray=DEFAULT.ray,
        **NO_KEYS,
    )


def _check_image(config: Config, containers: Containers) -> None:
    from triptych.engines.base import ENGINES  # not for every command's sake

    if (kind := ENGINES.get(config.engine)) is None:
        raise InvalidConfig(
            f"engine '{config.engine}' is unknown; there are {', '.join(sorted(ENGINES))}"
        )
    if kind.package and containers.image == Containers().image:
        raise InvalidConfig(
            f"--engine {config.engine} is not in {containers.image}, which has the built-in engine "
            "alone: make an image that has both (docs/engines.md says what it needs) and name it "
            "with --image"
        )
    if config.engine_python:
        raise InvalidConfig(
            "--engine-python is of `triptych serve`: containers run the Python of their --image"
        )


def _check_paths(config: Config, containers: Containers) -> None:
    for flag, path in _paths(config):
        if not path.startswith("/"):
            raise InvalidConfig(
                f"{_told(flag)} '{path}' is a path inside the containers, so it begins with a "
                "slash, as in /models/NAME"
            )
    if containers.volume and not config.model:
        raise InvalidConfig("--volume is seen at the model's path: name it, as in /models/NAME")
    if config.run_dir:
        raise InvalidConfig("--run-dir is of one machine: containers find each other by --join")
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
                f"--{name.replace('_', '-')} is for a NATS that --join names: the one that is part "
                "of this has a password and no TLS"
            )


def _check_addresses(config: Config) -> None:
    for server in config.servers:
        if is_loopback(urlsplit(server).hostname or ""):
            raise InvalidConfig(
                f"--join {server} is each container itself: give the address by which containers "
                "reach that NATS"
            )
    if config.worker_host != DEFAULT.worker_host:
        raise InvalidConfig(
            f"--worker-host {config.worker_host} is of one host: each container has an address of "
            "its own, and is told it"
        )
    if not config.port:
        raise InvalidConfig("--port 0 is a different one each time: name one")


def unmounted_comment(config: Config, containers: Containers) -> str:
    """Comments that name the paths which nothing that is printed brings into the containers."""
    lines = [
        f"# - {path!r} ({_told(flag)}), in {WHERE[flag.of]}\n"
        for flag, path in _paths(config)
        if flag.path != ("model",) or not containers.volume
    ]
    head = "# Nothing below mounts these paths: mount them yourself, or have them in the image.\n"
    return head + "".join(lines) if lines else ""


def _paths(config: Config) -> Iterator[tuple[Setting, str]]:
    """Of the settings, those that are set."""
    for flag in all_settings():
        if flag.path[0] in PATHS and (path := getattr(config, flag.path[0])):
            yield flag, path


def _told(flag: Setting) -> str:
    return "MODEL" if flag.path == ("model",) else flag.name


def gpus_of_container(config: Config, containers: Containers) -> int:
    return config.gpus if containers.gpus < 0 else containers.gpus


def worker_words(config: Config, role: Role, index: str, host: str, join: str) -> list[str]:
    """The arguments of ``triptych``; ``index`` and ``host`` may be what others fill in."""
    own = [f"--role={role}", f"--index={index}", f"--ready-file={READY_FILE}"]
    return ["worker", *own, f"--join={join}", f"--worker-host={host}", *_common(config)]


def frontend_words(config: Config, host: str, join: str) -> list[str]:
    own = [f"--join={join}", "--host=0.0.0.0", f"--worker-host={host}"]
    return ["frontend", *own, *_common(config)]


def quote_for_nats(password: str) -> str:
    """A variable's value for ``NATS_CONF``. nats-server reads it as it reads that file, so without
    quotes it would take 1234 for a number and end x#y at its comment."""
    return f"'{password}'"


def stop_seconds(config: Config) -> int:
    """From the wish to stop to the end of a process by force."""
    return LEAVE_SECONDS + math.ceil(config.limits.drain_seconds) + END_SECONDS


def frontend_memory(config: Config, containers: Containers) -> int:
    """GiB: what its limits add up to, and one for itself; with decoders, a worker's at least."""
    limits = config.limits
    held = limits.media_in_flight_bytes + limits.loaded_media_bytes + limits.upload_bytes
    own = 1 + math.ceil((held + config.cache.fetched) / GIB)
    return own if config.decode_at == "encoder" else max(own, containers.memory)


def _common(config: Config) -> list[str]:
    """All settings that are not the defaults. Compose and Kubernetes read a ``$`` as the beginning
    of a name, unless there are two."""
    return [word.replace("$", "$$") for word in to_flags(config)]
