"""This machine and its processes: who is here, and whether a worker of here still lives."""

from __future__ import annotations

import functools
import ipaddress
import os
import socket
from pathlib import Path

from triptych.messages import WorkerRecord


@functools.cache
def here() -> str:
    """A name for people, then what tells this machine, or container, from all others: two are
    the same place exactly where a process number means the same process."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    processes = os.stat("/proc/self/ns/pid").st_ino
    return f"{socket.gethostname()} {boot} {processes}"


def name(host: str) -> str:
    """Of a host, for people."""
    return host.partition(" ")[0] or "another host"


def begun(pid: int) -> int:
    """When a process was started, in ticks since its host was; 0: it does not run."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return 0
    state, *fields = stat.rpartition(")")[2].split()
    return 0 if state in "ZX" else int(fields[18])  # Z, X: dead, and nobody has looked yet


def lives(worker: WorkerRecord) -> bool:
    """Whether the process is here that registered this record, and not a later one of its pid."""
    return worker.begun != 0 and begun(worker.pid) == worker.begun


def is_loopback(address: str) -> bool:
    """Whether a host, by name or number, is this machine to itself alone."""
    if address == "localhost":
        return True
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return False
