"""``triptych worker``: the process around one worker."""

from __future__ import annotations

import logging
import os
from functools import partial
from urllib.parse import urlsplit

import uvloop

from triptych.config import Config
from triptych.errors import InvalidConfig
from triptych.host import free_port, is_loopback
from triptych.observe import log as logs
from triptych.runtime.process import (
    CLOSE_SECONDS,
    exit_within,
    raise_descriptor_limit,
    ready_marker,
)
from triptych.stages.worker import serve
from triptych.topology import Role

log = logging.getLogger(__name__)


def main(config: Config, role: str, worker_id: str, secret: str, ready_file: str = "") -> int:
    logs.configure(config.log_format)
    os.dup2(2, 1)  # what engines print goes where everything is said, with this worker's name
    raise_descriptor_limit()
    roles = config.topology.roles
    if role not in roles:
        raise InvalidConfig(f"role '{role}' is none of {config.pattern}'s: {', '.join(roles)}")
    free_port(config.worker_host, 0, "--worker-host")  # refused before minutes of loading
    if config.join:
        _check_reachable(config)
    with ready_marker(ready_file) as ready:
        ending = partial(exit_within, CLOSE_SECONDS)
        return uvloop.run(serve(config, Role(role), worker_id, secret, ready, ending))


def _check_reachable(config: Config) -> None:
    """What is told to other hosts must lead them here."""
    if config.worker_host in ("0.0.0.0", "::"):
        raise InvalidConfig(
            f"--worker-host {config.worker_host} is no address that other hosts could be told. "
            "Give the one of this host by which they reach it."
        )
    far = [s for s in config.servers if not is_loopback(urlsplit(s).hostname or "")]
    if far and is_loopback(config.worker_host):
        log.warning(
            "NATS is on another host, but this worker listens on %s, where only its own host "
            "reaches it: give --worker-host the address of this host",
            config.worker_host,
        )
