"""``triptych worker``: the process around one worker."""

from __future__ import annotations

import os

import uvloop

from triptych.config import Config
from triptych.errors import InvalidConfig
from triptych.observe import log
from triptych.runtime import descriptors
from triptych.runtime.ports import free_port
from triptych.runtime.ready_file import shown_by
from triptych.stages.worker import serve
from triptych.topology import Role


def main(config: Config, role: str, worker_id: str, secret: str, ready_file: str = "") -> int:
    log.configure()
    os.dup2(2, 1)  # what engines print goes where everything is said, with this worker's name
    descriptors.take_all()
    roles = config.topology.roles
    if role not in roles:
        raise InvalidConfig(f"role '{role}' is none of {config.pattern}'s: {', '.join(roles)}")
    free_port(config.worker_host, 0, "--worker-host")  # refused before minutes of loading
    with shown_by(ready_file) as ready:
        return uvloop.run(serve(config, Role(role), worker_id, secret, ready))
