"""A Compose file: NATS, a frontend and every worker as containers of one machine."""

from __future__ import annotations

from typing import Any

from triptych.config import KEYS, Config, key_variable
from triptych.deploy.container import (
    NATS_CONF,
    NATS_HEALTHY,
    NATS_IMAGE,
    NATS_PORT,
    NATS_STORE,
    NATS_USER,
    READY_FILE,
    SCRATCH,
    SHARED_GIB,
    Containers,
    config_inside,
    frontend_memory,
    frontend_words,
    gpus_of_container,
    quote_for_nats,
    stop_seconds,
    worker_words,
)
from triptych.host import join_host_port
from triptych.topology import Role

SECRET = "${TRIPTYCH_SECRET:?is not set: openssl rand -hex 32}"
PASSWORD = "${TRIPTYCH_NATS_PASSWORD:?is not set: openssl rand -hex 32}"
LOAD_SECONDS = 600  # a service that loads is not unhealthy for this long
_HEALTHY = "import urllib.request as u; u.urlopen('http://127.0.0.1:{}/health', timeout=3)"
_HEALTHY_TLS = (  # the certificate is for the name by which clients reach the server
    "import ssl, urllib.request as u; c = ssl.create_default_context(); "
    "c.check_hostname = False; c.verify_mode = ssl.CERT_NONE; "
    "u.urlopen('https://127.0.0.1:{}/health', timeout=3, context=c)"
)
# Written at the start: not every Compose can mount a file (``configs``) on a read-only root.
_NATS = f'printf %s "$$NATS_CONF" > {SCRATCH}/nats.conf && exec nats-server -c {SCRATCH}/nats.conf'


def compose_comments(config: Config) -> str:
    """How to set the secrets, in commands of one line."""
    names = {"TRIPTYCH_SECRET": 32, "TRIPTYCH_NATS_PASSWORD": 32}
    names |= {key_variable(name): 16 for name in KEYS}
    joined = ""
    if config.join:
        del names["TRIPTYCH_NATS_PASSWORD"]
        joined = """\
# If NATS requires a login: TRIPTYCH_NATS_USER and TRIPTYCH_NATS_PASSWORD, or TRIPTYCH_NATS_TOKEN.
"""
    lines = "".join(
        f'#   echo "{name}=$(openssl rand -hex {count})" >> .env\n' for name, count in names.items()
    )
    return f"""\
# Once: secrets, in a file .env beside this one (or in the environment):
#   touch .env && chmod 600 .env
{lines}\
# Clients must send TRIPTYCH_API_KEY; without it everyone who reaches the server may use it.
# TRIPTYCH_ADMIN_KEY opens /cluster and /metrics.
{joined}\
# Then:
#   docker compose up
"""


def compose_document(config: Config, containers: Containers) -> dict[str, Any]:
    inside = config_inside(config, containers)
    own = not config.join
    join = config.join or f"nats://nats:{NATS_PORT}"
    servers: dict[str, Any] = {"frontend": _frontend(config, inside, containers, join)}
    for role, index in inside.topology.workers:
        name = f"{role.lower()}-{index}"
        servers[name] = _worker(inside, containers, role, index, name, join)
    for service in servers.values():
        service["environment"] |= _login(own)
        if own:
            service["depends_on"] = {"nats": {"condition": "service_healthy"}}
    if not own:
        return {"name": containers.name, "services": servers}
    services = {"nats": _nats()} | servers
    return {"name": containers.name, "services": services, "volumes": {"nats": {}}}


def _login(own: bool) -> dict[str, str]:
    """The login for NATS. An existing NATS may need none, or a token."""
    if own:
        return {"TRIPTYCH_NATS_USER": NATS_USER, "TRIPTYCH_NATS_PASSWORD": PASSWORD}
    names = ("TRIPTYCH_NATS_USER", "TRIPTYCH_NATS_PASSWORD", "TRIPTYCH_NATS_TOKEN")
    return {name: f"${{{name}:-}}" for name in names}


def _nats() -> dict[str, Any]:
    port, path = NATS_HEALTHY
    health = ["CMD", "wget", "-q", "-O", "/dev/null", f"http://127.0.0.1:{port}{path}"]
    return {
        "image": NATS_IMAGE,
        "entrypoint": ["sh", "-c", _NATS],
        "environment": {
            "NATS_CONF": NATS_CONF.replace("$", "$$"),
            "NATS_PASSWORD": quote_for_nats(PASSWORD),
        },
        "healthcheck": {"test": health, "interval": "5s", "timeout": "5s", "retries": 3},
        "volumes": [f"nats:{NATS_STORE}"],
        "restart": "unless-stopped",
        **_locked(),
        "tmpfs": [SCRATCH],
    }


def _frontend(config: Config, inside: Config, containers: Containers, join: str) -> dict[str, Any]:
    port = inside.port
    probe = _HEALTHY_TLS if inside.tls_cert else _HEALTHY
    health = ["CMD", "python", "-c", probe.format(port)]
    service = _service(inside, containers, frontend_words(inside, "frontend", join), health)
    for name in KEYS:  # required if the operator has set one
        default = ":?is not set: openssl rand -hex 16" if getattr(config, name) else ":-"
        service["environment"][key_variable(name)] = f"${{{key_variable(name)}{default}}}"
    service["hostname"] = "frontend"
    service["ports"] = [f"{join_host_port(config.host, port)}:{port}"]
    service["mem_limit"] = f"{frontend_memory(inside, containers)}g"
    return service


def _worker(
    inside: Config, containers: Containers, role: Role, index: int, name: str, join: str
) -> dict[str, Any]:
    words = worker_words(inside, role, str(index), name, join)
    service = _service(inside, containers, words, ["CMD", "test", "-e", READY_FILE])
    service["hostname"] = name  # it listens on the address of its name
    service["shm_size"] = f"{SHARED_GIB}g"
    service["mem_limit"] = f"{containers.memory}g"
    service["cpus"] = containers.cpus
    if count := gpus_of_container(inside, containers):
        device = {"driver": "nvidia", "count": count, "capabilities": ["gpu"]}
        service["deploy"] = {"resources": {"reservations": {"devices": [device]}}}
    return service


def _service(
    inside: Config, containers: Containers, words: list[str], health: list[str]
) -> dict[str, Any]:
    """What frontend and workers have in common."""
    model = {"volumes": [_mount(containers, inside.model)]} if containers.volume else {}
    return {
        "image": containers.image,
        "command": words,
        "environment": {"HOME": SCRATCH, "TRIPTYCH_SECRET": SECRET},
        "healthcheck": {
            "test": health,
            "start_period": f"{LOAD_SECONDS}s",
            "interval": "5s",
            "timeout": "5s",
            "retries": 3,
        },
        "restart": "unless-stopped",
        "stop_grace_period": f"{stop_seconds(inside)}s",
        **_locked(),
        "tmpfs": [SCRATCH],
        **model,
    }


def _locked() -> dict[str, Any]:
    """Drops all capabilities, and leaves the sandbox what it needs to lock itself down."""
    security = ["no-new-privileges:true"]
    return {"read_only": True, "cap_drop": ["ALL"], "security_opt": security}


def _mount(containers: Containers, model: str) -> dict[str, Any]:
    return {"type": "bind", "source": containers.volume, "target": model, "read_only": True}
