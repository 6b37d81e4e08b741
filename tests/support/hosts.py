"""Hosts as network namespaces: each has an address of its own, and a cable to one switch.

They share this machine's kernel, files and process numbers, and nothing of its network. Needs root.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


def possible() -> bool:
    """Whether hosts can be made here: namespaces, cables and a switch."""
    if os.geteuid() != 0 or shutil.which("ip") is None or shutil.which("ss") is None:
        return False
    try:
        with tempfile.TemporaryDirectory() as folder, hosts(1, Path(folder)):
            return True
    except subprocess.CalledProcessError:
        return False


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)


@dataclass
class Host:
    """``name`` is the namespace's."""

    name: str
    address: str
    log: Path
    processes: list[subprocess.Popen[bytes]] = field(default_factory=list)

    def start(self, *argv: str, env: dict[str, str] | None = None) -> subprocess.Popen[bytes]:
        with open(self.log, "ab") as log:
            process = subprocess.Popen(
                ["ip", "netns", "exec", self.name, *argv],
                stdout=log,
                stderr=log,
                env=os.environ | (env or {}),
            )
        self.processes.append(process)
        return process

    def run(self, *argv: str) -> str:
        done = subprocess.run(
            ["ip", "netns", "exec", self.name, *argv], check=True, capture_output=True, text=True
        )
        return done.stdout

    def listens_at(self) -> set[str]:
        """Every address, without its port, that something on this host takes connections at."""
        lines = self.run("ss", "-Hltn").splitlines()
        return {line.split()[3].rpartition(":")[0] for line in lines}

    def cut_off(self) -> None:
        """Pull the cable."""
        self.run("ip", "link", "set", "eth0", "down")

    def plug_in(self) -> None:
        self.run("ip", "link", "set", "eth0", "up")

    def drop_to(self, other: Host) -> None:
        """Lose whatever is sent to another host. What that one sends still comes."""
        self.run("ip", "route", "add", "blackhole", f"{other.address}/32")

    def reach(self, other: Host) -> None:
        self.run("ip", "route", "del", "blackhole", f"{other.address}/32")

    def tail(self) -> str:
        return self.log.read_text(errors="replace")[-3000:]


@contextlib.contextmanager
def hosts(count: int, folder: Path) -> Iterator[list[Host]]:
    """So many hosts on one switch; their processes end with the scope, and then they are gone."""
    mark, net = secrets.token_hex(3), f"10.213.{1 + secrets.randbelow(250)}"
    switch = f"tri{mark}"
    with contextlib.ExitStack() as scope:
        ip("link", "add", switch, "type", "bridge")
        scope.callback(ip, "link", "del", switch)
        ip("addr", "add", f"{net}.1/24", "dev", switch)  # clients ask from there
        ip("link", "set", switch, "up")
        yield [_host(mark, net, switch, number, folder, scope) for number in range(count)]


def _host(
    mark: str, net: str, switch: str, number: int, folder: Path, scope: contextlib.ExitStack
) -> Host:
    name, cable = f"tri{mark}{number}", f"tc{mark}{number}"
    host = Host(name, f"{net}.{10 + number}", folder / f"host{number}.log")
    ip("netns", "add", name)
    scope.callback(_end, host)
    ip("link", "add", cable, "type", "veth", "peer", "name", "eth0", "netns", name)
    ip("link", "set", cable, "master", switch, "up")
    for words in (
        ("link", "set", "lo", "up"),
        ("addr", "add", f"{host.address}/24", "dev", "eth0"),
        ("link", "set", "eth0", "up"),
    ):
        ip("-n", name, *words)
    return host


def _end(host: Host) -> None:
    running: list[Any] = [p for p in host.processes if p.poll() is None]
    for process in running:
        process.terminate()
    for process in running:
        try:
            process.wait(timeout=20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
    ip("netns", "del", host.name)
