"""One NIXL agent and the thread that alone calls it.

NIXL makes no progress by itself here: its own progress thread burns half a core, so ours polls it,
in pauses that grow with the time since something last happened. Commands come in by a queue; the
thread steps operations until they are done, and gives other agents' messages to ``on_message``.
Knows no ticket. ``_Nixl`` is the only place that calls NIXL, and turns its errors into NixlError.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import ipaddress
import logging
import os
import queue
import socket
import struct
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future
from operator import methodcaller
from pathlib import Path
from typing import Any, Protocol, TypeVar

from triptych.errors import InvalidConfig, TicketLost
from triptych.host import resolve_host
from triptych.transfer.base import TransportError
from triptych.transfer.segment import Segment

log = logging.getLogger(__name__)
T = TypeVar("T")

MemoryDescriptor = tuple[int, int, int]  # address, bytes, device: 0 for the host's own memory
ACTIVE_SECONDS = 20e-6  # between two polls while bytes are under way
AWAKE_SECONDS = 1e-3  # at most, while another agent may ask us for something
ASLEEP_SECONDS = 50e-3  # at most, while none has reason to
IDLE_FRACTION = 20  # a pause is this part of the time since something happened
STOP_POLLING_SECONDS = 60.0  # after so long without reason or event the thread only waits
MOST_REMOTES = 256  # other agents that are remembered
_BACKENDS = ["UCX"]
_SIOCGIFADDR, _SIOCGIFNETMASK = 0x8915, 0x891B


class NixlError(TransportError):
    """Whatever NIXL raises. ``disconnected``: a connection to another agent is broken."""

    def __init__(self, message: str, *, disconnected: bool = False) -> None:
        super().__init__(message)
        self.disconnected = disconnected


class _Nixl:
    """NIXL's Python API. Its errors have no common base: each call raises NixlError instead."""

    def __init__(self, name: str, host: str) -> None:
        self._agent = self._translated(_make_agent, name, host)

    def call(self, method: str, *args: Any, **options: Any) -> Any:
        return self._translated(methodcaller(method, *args, **options), self._agent)

    def release(self, handle: Any) -> None:
        self._translated(methodcaller("release"), handle)

    @staticmethod
    def _translated(call: Callable[..., Any], *args: Any) -> Any:
        try:
            return call(*args)
        except InvalidConfig:  # our own
            raise
        except Exception as error:
            name = type(error).__name__
            broken = isinstance(error, RuntimeError) or "Disconnect" in name or "Backend" in name
            raise NixlError(str(error) or name, disconnected=broken) from error


def _make_agent(name: str, host: str) -> Any:
    """NIXL's agent, with its sockets on the interface that has the address ``host``.

    UCX_NET_DEVICES overrules that: the address may then be one that no interface has.
    """
    if "UCX_NET_DEVICES" not in os.environ and (interface := interface_of(host)) is not None:
        ports = Path("/sys/class/infiniband").glob("*/ports/*")  # these listen on no address
        fast = [f"{port.parent.parent.name}:{port.name}" for port in ports]
        os.environ["UCX_NET_DEVICES"] = ",".join([interface, *fast])
    os.environ.setdefault("NIXL_LOG_LEVEL", "FATAL")  # our own errors say what goes wrong
    os.environ.setdefault("UCX_LOG_LEVEL", "fatal")
    from nixl_cu13._api import nixl_agent, nixl_agent_config

    return nixl_agent(name, nixl_agent_config(enable_prog_thread=False, backends=_BACKENDS))


class Operation(Protocol):
    """Something under way. The agent's thread alone calls its methods."""

    pace: float  # seconds until the next step

    def step(self) -> bool:
        """Continue; True: it is over. Must not raise."""

    def abort(self) -> None:
        """The agent closes."""


class RunningTransfer:
    """A READ or WRITE, in the agent's thread. ``done`` raises NixlError if it failed."""

    def __init__(self, nixl: _Nixl, handle: Any) -> None:
        self._nixl = nixl
        self._handle = handle
        self._state = ""

    def done(self) -> bool:
        if not self._state:  # between processes of one host this copies everything at once
            self._state = self._nixl.call("transfer", self._handle)
        elif self._state == "PROC":
            self._state = self._nixl.call("check_xfer_state", self._handle)
        if self._state not in ("DONE", "PROC"):
            raise NixlError("the transfer failed", disconnected=True)
        return bool(self._state == "DONE")

    def release(self) -> None:
        with contextlib.suppress(NixlError):  # still under way: the agent ends it with itself
            self._nixl.release(self._handle)


class NixlAgent:
    """``name`` is of this incarnation alone; ``host``: the address where others reach it.

    ``awake`` says whether others may have reason to ask us. Methods under "inside" are for
    operations, ``on_message`` and commands: they run in the agent's thread.
    """

    def __init__(self, name: str, host: str, awake: Callable[[], bool]) -> None:
        self.name = name
        self.on_message: Callable[[str, bytes], None] = lambda sender, message: None
        self.operations: list[Operation] = []
        self._awake = awake
        # Not a SimpleQueue: where a short timeout has passed before CPython 3.11 and 3.12 begin to
        # wait, what is left of it is negative, which they take for no timeout at all.
        self._commands: queue.Queue[tuple[Future[Any], Callable[..., Any], Any] | None]
        self._commands = queue.Queue()
        self._regions: dict[bytes, tuple[Any, bytes]] = {}  # by nonce: registration and metadata
        self._remotes: OrderedDict[str, bytes] = OrderedDict()  # the metadata that we know
        self._last_event = time.monotonic()
        self._nixl: Any = _Nixl(name, host)
        self._thread = threading.Thread(target=self._run, name="nixl", daemon=True)
        self._thread.start()

    def submit(self, call: Callable[..., T], *args: Any) -> Future[T]:
        """Run a command in the agent's thread."""
        done: Future[T] = Future()
        self._commands.put((done, call, args))
        if not self._thread.is_alive():
            self._refuse_all()
        return done

    def deregister(self, segment: Segment) -> None:
        """Deregister and drop a segment, soon: its memory is not unmapped before."""
        if segment.nonce in self._regions:
            self.submit(self._deregister, segment)

    @property
    def regions(self) -> int:
        """Pieces of memory that are registered."""
        return len(self._regions)

    def close(self) -> None:
        """End all operations and the agent itself. Blocks until it is gone."""
        self._commands.put(None)
        self._thread.join()
        self._refuse_all()

    # Inside.

    def register(self, segment: Segment) -> MemoryDescriptor:
        """Make a segment reachable, once; returns where it lies."""
        place = (ctypes.addressof(segment.memory), ctypes.sizeof(segment.memory), 0)
        if segment.nonce not in self._regions:
            region = self._nixl.call("register_memory", [(*place, "")], "DRAM", _BACKENDS)
            about = self._nixl.call("get_partial_agent_metadata", region, True, _BACKENDS)
            self._regions[segment.nonce] = region, about
        return place

    def metadata(self, segments: list[Segment]) -> bytes:
        """What another agent must load before it can reach these segments, or us."""
        places = [self.register(segment) for segment in segments]
        if len(segments) == 1:
            return self._regions[segments[0].nonce][1]
        regions = self._nixl.call("get_reg_descs", [(*place, "") for place in places], "DRAM")
        about: bytes = self._nixl.call("get_partial_agent_metadata", regions, True, _BACKENDS)
        return about

    def add_remote(self, name: str, metadata: bytes) -> None:
        """Know another agent, and what it has registered."""
        if self._remotes.get(name) != metadata:
            if self._nixl.call("add_remote_agent", metadata) not in (name, name.encode()):
                raise NixlError("the metadata are of another agent")
            self._remotes[name] = metadata
            while len(self._remotes) > MOST_REMOTES:
                self.remove_remote(next(iter(self._remotes)))
        self._remotes.move_to_end(name)

    def remove_remote(self, name: str) -> None:
        """Forget another agent and cut its connection."""
        if self._remotes.pop(name, None) is not None:
            with contextlib.suppress(NixlError):  # it may be gone already
                self._nixl.call("remove_remote_agent", name)

    def notify(self, name: str, message: bytes) -> None:
        self._nixl.call("send_notif", name, message)

    def start_transfer(
        self,
        what: str,
        here: list[MemoryDescriptor],
        there: list[MemoryDescriptor],
        name: str,
    ) -> RunningTransfer:
        """Begin to READ or WRITE, all pieces in one transfer.

        Descriptor lists are not prepared ahead: for 512 pieces that saves 0.02 of 0.12 ms.
        """
        lists = [self._nixl.call("get_xfer_descs", places, "DRAM") for places in (here, there)]
        handle = self._nixl.call("initialize_xfer", what, *lists, name, backends=_BACKENDS)
        return RunningTransfer(self._nixl, handle)

    # The thread.

    def _run(self) -> None:
        try:
            while self._run_command():
                self._poll()
        finally:  # nobody must wait for what does not come any more
            for operation in self.operations:
                operation.abort()
            self.operations.clear()
            self._regions.clear()
            self._nixl = None  # the agent deregisters what it has, and closes its sockets

    def _pause(self) -> float | None:
        if self.operations:
            return min(operation.pace for operation in self.operations)
        idle = time.monotonic() - self._last_event
        awake = self._awake()
        if idle > STOP_POLLING_SECONDS and not awake:
            return None
        longest = AWAKE_SECONDS if awake else ASLEEP_SECONDS
        return min(max(idle / IDLE_FRACTION, ACTIVE_SECONDS), longest)

    def _run_command(self) -> bool:
        """Wait for a command, not for long, and run it. Keeps nothing of it; False: to end."""
        try:
            command = self._commands.get(timeout=self._pause())
        except queue.Empty:
            return True
        if command is None:
            return False
        done, call, args = command
        self._last_event = time.monotonic()
        if done.set_running_or_notify_cancel():
            _complete(done, call, *args)
        return True

    def _poll(self) -> None:
        try:
            news = self._nixl.call("get_new_notifs", _BACKENDS)
        except NixlError as error:  # of one connection; the others go on
            log.debug("NIXL could not be polled: %s", error)
            news = {}
        for sender, messages in news.items():
            self._last_event = time.monotonic()
            for message in messages:
                self._handle(sender, message)
        if self.operations:
            self._last_event = time.monotonic()
            self.operations = [one for one in self.operations if not one.step()]

    def _handle(self, sender: str | bytes, message: bytes) -> None:
        """Any process may send a message: none of them ends the thread."""
        if isinstance(sender, bytes):
            sender = sender.decode(errors="replace")
        done: Future[None] = Future()
        _complete(done, self.on_message, sender, message)
        if (error := done.exception()) is not None:
            log.error("dropped a NIXL message of %s", sender, exc_info=error)

    def _deregister(self, segment: Segment) -> None:
        region = self._regions.pop(segment.nonce, None)
        if region is not None:
            self._nixl.call("deregister_memory", region[0], _BACKENDS)

    def _refuse_all(self) -> None:
        with contextlib.suppress(queue.Empty):
            while True:
                command = self._commands.get_nowait()
                if command is not None and command[0].set_running_or_notify_cancel():
                    command[0].set_exception(TicketLost("this process is ending"))


def _complete(done: Future[T], call: Callable[..., T], *args: Any) -> None:
    """Run a call as an executor does: its result or its error goes to ``done``."""
    try:
        done.set_result(call(*args))
    except Exception as error:  # noqa: BLE001 (``done`` gives it to the caller)
        done.set_exception(error)
    finally:
        del done, call, args  # the error would hold them, and they it, until a collection


def interface_of(host: str) -> str | None:
    """The interface that has this address; None where the address stands for all of them."""
    try:
        address = resolve_host(host)
    except OSError as error:
        raise InvalidConfig(f"--worker-host {host}: {error.strerror}") from None
    if address.is_unspecified:
        return None
    name = _with_ipv6(address) if address.version == 6 else _with_ipv4(address)
    if name is None:
        raise InvalidConfig(f"--worker-host {host}: no interface of this machine has that address")
    return name


def _with_ipv4(address: ipaddress.IPv4Address) -> str | None:
    """The interface of that address, or else of its subnet: its address may be the second one."""
    networks = {name: network for name in _names() if (network := _ipv4(name)) is not None}
    exact = [name for name, network in networks.items() if network.ip == address]
    near = [name for name, network in networks.items() if address in network.network]
    return next(iter(exact + near), None)


def _names() -> list[str]:
    return [name for _, name in socket.if_nameindex()]


def _ipv4(name: str) -> ipaddress.IPv4Interface | None:
    ask = struct.pack("256s", name.encode()[:15])
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        try:
            address, mask = (
                socket.inet_ntoa(fcntl.ioctl(any_socket, what, ask)[20:24])
                for what in (_SIOCGIFADDR, _SIOCGIFNETMASK)
            )
        except OSError:  # it has none
            return None
    return ipaddress.IPv4Interface(f"{address}/{mask}")


def _with_ipv6(address: ipaddress.IPv6Address) -> str | None:
    file = Path("/proc/net/if_inet6")
    lines = file.read_text().splitlines() if file.exists() else []
    found = (line.split() for line in lines)
    return next((words[5] for words in found if int(words[0], 16) == int(address)), None)
