"""One NIXL agent and the thread that alone touches it.

NIXL moves nothing by itself here: its own progress thread burns half a core, so ours pumps it, in
naps that grow with the time since something last happened. Commands come in by a queue; operations
are stepped until they are done; what other agents say goes to ``hear``. Knows no ticket.
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
from pathlib import Path
from typing import Any, Protocol, TypeVar

from triptych.errors import InvalidConfig, TicketLost, install_hint
from triptych.transfer.segment import Segment

log = logging.getLogger(__name__)
_SIOCGIFADDR, _SIOCGIFNETMASK = 0x8915, 0x891B
T = TypeVar("T")

MemoryDescriptor = tuple[int, int, int]  # address, bytes, device: 0 for the host's own memory
AT_WORK = 20e-6  # seconds between two pumps while bytes are under way
AWAKE = 1e-3  # at most, while somebody may ask us for something
ASLEEP = 50e-3  # at most, while nobody has reason to
EASING = 20  # a nap is this part of the time since something happened
PUMP_IDLE_SECONDS = 60.0  # after so long without reason or event the pump stands still
REMOTES = 256  # other agents that are remembered


class Operation(Protocol):
    """Something under way. Its methods are called by the agent's thread alone."""

    pace: float  # seconds until it wants to go on

    def step(self) -> bool:
        """Go on; True: it is over. Must not raise."""

    def abort(self) -> None:
        """The agent closes."""


class NixlAgent:
    """``name`` is of this incarnation alone; ``host``: the address that it may be reached at.

    ``awake`` says whether others may have reason to ask us. Methods under "inside" are for
    operations, ``hear`` and commands: they run in the agent's thread.
    """

    def __init__(self, name: str, host: str, awake: Callable[[], bool]) -> None:
        self.name = name
        self.hear: Callable[[str, bytes], None] = lambda sender, message: None
        self.operations: list[Operation] = []
        self._awake = awake
        # Not a SimpleQueue: where a short timeout has passed before CPython 3.11 and 3.12 begin to
        # wait, what is left of it is negative, which they take for no timeout at all.
        self._commands: queue.Queue[tuple[Future[Any], Callable[..., Any], Any] | None]
        self._commands = queue.Queue()
        self._regions: dict[bytes, tuple[Any, bytes]] = {}  # by nonce: what is registered
        self._remotes: OrderedDict[str, bytes] = OrderedDict()  # the metadata that we know
        self._happened = time.monotonic()
        self._nixl = _open(name, host)
        self._thread = threading.Thread(target=self._run, name="nixl", daemon=True)
        self._thread.start()

    def do(self, call: Callable[..., T], *args: Any) -> Future[T]:
        """Run a command in the agent's thread."""
        done: Future[T] = Future()
        self._commands.put((done, call, args))
        if not self._thread.is_alive():
            self._refuse_all()
        return done

    def forget(self, segment: Segment) -> None:
        """Deregister and drop a segment, soon: its memory is not unmapped before."""
        if segment.nonce in self._regions:
            self.do(self._deregister, segment)

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
        """Make a segment reachable, once; gives where it lies."""
        spot = (ctypes.addressof(segment.memory), ctypes.sizeof(segment.memory), 0)
        if segment.nonce not in self._regions:
            region = self._nixl.register_memory([(*spot, "")], "DRAM", ["UCX"])
            about = self._nixl.get_partial_agent_metadata(region, True, ["UCX"])
            self._regions[segment.nonce] = region, about
        return spot

    def metadata(self, segments: list[Segment]) -> bytes:
        """What another agent must load before it can reach these segments, or us."""
        spots = [self.register(segment) for segment in segments]
        if len(segments) == 1:
            return self._regions[segments[0].nonce][1]
        regions = self._nixl.get_reg_descs([(*spot, "") for spot in spots], "DRAM")
        about: bytes = self._nixl.get_partial_agent_metadata(regions, True, ["UCX"])
        return about

    def meet(self, name: str, metadata: bytes) -> None:
        """Know another agent, and what it has registered."""
        if self._remotes.get(name) != metadata:
            if self._nixl.add_remote_agent(metadata) not in (name, name.encode()):
                raise ValueError("another agent's metadata")
            self._remotes[name] = metadata
            while len(self._remotes) > REMOTES:
                self.part(next(iter(self._remotes)))
        self._remotes.move_to_end(name)

    def part(self, name: str) -> None:
        """Forget another agent and cut its connection."""
        if self._remotes.pop(name, None) is not None:
            with contextlib.suppress(Exception):  # it may be gone already
                self._nixl.remove_remote_agent(name)

    def tell(self, name: str, message: bytes) -> None:
        self._nixl.send_notif(name, message)

    def start(
        self, what: str, here: list[MemoryDescriptor], there: list[MemoryDescriptor], name: str
    ) -> RunningTransfer:
        """Begin to READ or WRITE, all pieces in one transfer.

        Descriptor lists are not prepared ahead: for 512 pieces that saves 0.02 of 0.12 ms.
        """
        lists = (self._nixl.get_xfer_descs(spots, "DRAM") for spots in (here, there))
        handle = self._nixl.initialize_xfer(what, *lists, name, backends=["UCX"])
        return RunningTransfer(self._nixl, handle)

    # The thread.

    def _run(self) -> None:
        try:
            while self._obey():
                self._pump()
        finally:  # nobody must wait for what does not come any more
            for operation in self.operations:
                operation.abort()
            self.operations.clear()
            self._regions.clear()
            self._nixl = None  # the agent deregisters what it has, and closes its sockets

    def _nap(self) -> float | None:
        if self.operations:
            return min(operation.pace for operation in self.operations)
        idle = time.monotonic() - self._happened
        awake = self._awake()
        if idle > PUMP_IDLE_SECONDS and not awake:
            return None
        return min(max(idle / EASING, AT_WORK), AWAKE if awake else ASLEEP)

    def _obey(self) -> bool:
        """Wait for a command, not for long, and run it. Keeps nothing of it; False: to end."""
        try:
            command = self._commands.get(timeout=self._nap())
        except queue.Empty:
            return True
        if command is None:
            return False
        done, call, args = command
        self._happened = time.monotonic()
        if done.set_running_or_notify_cancel():
            try:
                done.set_result(call(*args))
            except Exception as error:  # noqa: BLE001 (it is the caller's to judge)
                done.set_exception(error)
        return True

    def _pump(self) -> None:
        try:
            news = self._nixl.get_new_notifs(["UCX"])
        except Exception as error:  # noqa: BLE001 (of one connection; the others go on)
            log.debug("NIXL: %s", error)
            news = {}
        for sender, messages in news.items():
            self._happened = time.monotonic()
            for message in messages:
                self._heed(sender, message)
        if self.operations:
            self._happened = time.monotonic()
            self.operations = [operation for operation in self.operations if not operation.step()]

    def _heed(self, sender: str | bytes, message: bytes) -> None:
        try:
            self.hear(sender if isinstance(sender, str) else sender.decode(), message)
        except Exception:  # (anybody may speak: one word must not end the thread)
            log.exception("a word of a NIXL agent was dropped")

    def _deregister(self, segment: Segment) -> None:
        region = self._regions.pop(segment.nonce, None)
        if region is not None:
            self._nixl.deregister_memory(region[0], ["UCX"])

    def _refuse_all(self) -> None:
        with contextlib.suppress(queue.Empty):
            while True:
                command = self._commands.get_nowait()
                if command is not None and command[0].set_running_or_notify_cancel():
                    command[0].set_exception(TicketLost("this process is ending"))


def broken(error: Exception) -> bool:
    """Whether NIXL says that a connection is no more. Its errors have no common base."""
    name = type(error).__name__
    return isinstance(error, RuntimeError) or "Disconnect" in name or "Backend" in name


class RunningTransfer:
    """A transfer under way, in the agent's thread. ``done`` raises what NIXL says is wrong."""

    def __init__(self, nixl: Any, handle: Any) -> None:
        self._nixl = nixl
        self._handle = handle
        self._state = ""

    def done(self) -> bool:
        if not self._state:  # between processes of one host this copies everything at once
            self._state = self._nixl.transfer(self._handle)
        elif self._state == "PROC":
            self._state = self._nixl.check_xfer_state(self._handle)
        if self._state not in ("DONE", "PROC"):
            raise RuntimeError("the transfer failed")
        return self._state == "DONE"

    def release(self) -> None:
        with contextlib.suppress(Exception):  # under way still: the agent ends it with itself
            self._handle.release()


def _open(name: str, host: str) -> Any:
    """The agent itself. Keeps its sockets to the interface that has our address."""
    if "UCX_NET_DEVICES" not in os.environ and (interface := interface_of(host)) is not None:
        ports = Path("/sys/class/infiniband").glob("*/ports/*")  # these listen on no address
        fast = [f"{port.parent.parent.name}:{port.name}" for port in ports]
        os.environ["UCX_NET_DEVICES"] = ",".join([interface, *fast])
    os.environ.setdefault("NIXL_LOG_LEVEL", "FATAL")  # what goes wrong is told by our own errors
    os.environ.setdefault("UCX_LOG_LEVEL", "fatal")
    try:
        from nixl_cu13._api import nixl_agent, nixl_agent_config
    except ImportError as error:
        raise InvalidConfig(
            f"transport 'nixl' needs NIXL ({error}). {install_hint('nixl')}"
        ) from None
    return nixl_agent(name, nixl_agent_config(enable_prog_thread=False, backends=["UCX"]))


def interface_of(host: str) -> str | None:
    """The interface that has this address; None where the address stands for all of them."""
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][4][0]
    except OSError as error:
        raise InvalidConfig(f"--worker-host {host}: {error.strerror}") from None
    address = ipaddress.ip_address(str(found).partition("%")[0])
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
