"""A Compose file: NATS, a frontend and every worker as containers of one machine."""

from __future__ import annotations

from typing import Any

from triptych.config import Config
from triptych.render.container import (
    NATS_IMAGE,
    NATS_PORT,
    NATS_STORE,
    READY_FILE,
    SCRATCH,
    SHARED_GIB,
    Containers,
    contained,
    frontend_memory,
    frontend_words,
    gpus,
    nats_words,
    stop_seconds,
    worker_words,
)
from triptych.runtime.ports import authority
from triptych.topology import Role

HEAD = """\
# docker compose up. Secrets come from the environment, or from a file .env beside this one:
#   echo "TRIPTYCH_SECRET=$(openssl rand -hex 32)" >> .env
#   echo "TRIPTYCH_NATS_PASSWORD=$(openssl rand -hex 32)" >> .env
#   echo "TRIPTYCH_API_KEY=$(openssl rand -hex 16)" >> .env     (what clients must send)
"""
NATS_USER = "triptych"
PASSWORD = "${TRIPTYCH_NATS_PASSWORD:?is not set: openssl rand -hex 32}"
SECRET = "${TRIPTYCH_SECRET:?is not set: openssl rand -hex 32}"
_HEALTHY = "import urllib.request as u; u.urlopen('http://127.0.0.1:{}/health', timeout=3)"


def document(config: Config, containers: Containers) -> dict[str, Any]:
    inside = contained(config, containers)
    join = config.join or f"nats://nats:{NATS_PORT}"
    own = not config.join
    services: dict[str, Any] = {"nats": _nats()} if own else {}
    services["frontend"] = _frontend(config, inside, containers, join)
    for group in inside.topology.groups:
        for index in range(group.count):
            name = f"{group.role.lower()}-{index}"
            services[name] = _worker(inside, containers, group.role, index, name, join)
    for service in services.values() if own else ():
        if service["image"] != NATS_IMAGE:
            service["depends_on"] = ["nats"]
    volumes: dict[str, Any] = {"volumes": {"nats": {}}} if own else {}
    return {"name": containers.name, "services": services, **volumes}


def _nats() -> dict[str, Any]:
    return {
        "image": NATS_IMAGE,
        "command": nats_words(NATS_USER, PASSWORD),
        "volumes": [f"nats:{NATS_STORE}"],
        "restart": "unless-stopped",
        **_locked(),
    }


def _frontend(config: Config, inside: Config, containers: Containers, join: str) -> dict[str, Any]:
    port = inside.port
    health = ["CMD", "python", "-c", _HEALTHY.format(port)]
    service = _service(inside, containers, frontend_words(inside, "frontend", join), health)
    service["environment"]["TRIPTYCH_API_KEY"] = "${TRIPTYCH_API_KEY:-}"
    service["hostname"] = "frontend"
    service["ports"] = [f"{authority(config.host, port)}:{port}"]
    service["mem_limit"] = f"{frontend_memory(inside, containers)}g"
    return service


def _worker(
    inside: Config, containers: Containers, role: Role, index: int, name: str, join: str
) -> dict[str, Any]:
    words = worker_words(inside, role, str(index), name, join)
    service = _service(inside, containers, words, ["CMD", "test", "-e", READY_FILE])
    service["hostname"] = name  # it listens on the address that its own name has
    service["shm_size"] = f"{SHARED_GIB}g"
    service["mem_limit"] = f"{containers.memory}g"
    service["cpus"] = containers.cpus
    if count := gpus(inside, containers):
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
        "environment": {
            "HOME": SCRATCH,
            "TRIPTYCH_SECRET": SECRET,
            "TRIPTYCH_NATS_USER": NATS_USER,
            "TRIPTYCH_NATS_PASSWORD": PASSWORD,
        },
        "healthcheck": {"test": health, "interval": "5s", "timeout": "5s", "retries": 3},
        "restart": "unless-stopped",
        "stop_grace_period": f"{stop_seconds(inside)}s",
        **_locked(),
        "tmpfs": [SCRATCH],
        **model,
    }


def _locked() -> dict[str, Any]:
    """Of the decoders' own locks it takes none away, and gives no capability."""
    security = ["no-new-privileges:true"]
    return {"read_only": True, "cap_drop": ["ALL"], "security_opt": security}


def _mount(containers: Containers, model: str) -> dict[str, Any]:
    return {"type": "bind", "source": containers.volume, "target": model, "read_only": True}
