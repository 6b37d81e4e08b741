"""Where SGLang's processes listen: at the worker's own address, and nowhere else.

None of their sockets asks who is there. Left to themselves they take the address of the machine's
network card, and torch's store, by which ranks find each other, takes all there are.
"""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import Any

from triptych.host import free_port, resolve_host

LOOPBACK = "lo"


def sglang_environment(
    host: str, arguments: Any, folder: Path, given: Collection[str]
) -> dict[str, str]:
    """Variables for SGLang's processes, but for those that the operator has ``given``.

    ``arguments``: its ServerArgs. ``folder``: this engine's own.
    """
    found: dict[str, str] = {}
    where = resolve_host(host)  # in figures: a socket of ZeroMQ's knows no names
    if not where.is_unspecified:  # where any would do SGLang has to choose one to tell others
        found["SGLANG_HOST_IP"] = str(where)
    if arguments.nnodes == 1:
        if arguments.dp_size == 1 and arguments.dist_init_addr is None:
            # Ranks meet in a file. With several groups of them each would need one of its own.
            found["SGLANG_DISTRIBUTED_INIT_METHOD_OVERRIDE"] = f"file://{folder / 'ranks'}"
            # By these its kernels for CPUs name shared memory: no two engines may have the same.
            found["MASTER_ADDR"] = str(where)
            found["MASTER_PORT"] = str(free_port(host, 0, "--worker-host"))
        if where.is_loopback:  # nobody is to be met elsewhere
            found["GLOO_SOCKET_IFNAME"] = found["NCCL_SOCKET_IFNAME"] = LOOPBACK
            if "UCX_TLS" not in given:
                found["UCX_NET_DEVICES"] = LOOPBACK
    return {name: value for name, value in found.items() if name not in given}
