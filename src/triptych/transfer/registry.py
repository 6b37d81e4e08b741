"""The table of transports. A transport is one module and one entry here.

The choices of ``--transport``, what ``auto`` takes, which packages and settings a transport needs
and whether containers may use it: all of them come from this table, in the order of preference.
It imports no transport: ``TransportEntry.module`` has ``open_transport(context)``.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from msgspec import Struct


class TransferEndpoint(Struct, frozen=True):
    """A process that publishes or reads tensors, as far as transports have to know it."""

    memory: str  # processes with the same value can map each other's memory; none: unknown
    gpu: str = ""  # the GPU whose memory it shares
    transports: tuple[str, ...] = ()  # whose tickets it can read
    folder: str = ""  # id of the shared folder that it has opened


def same_gpu(name: str, endpoints: Sequence[TransferEndpoint]) -> bool:
    gpus = {endpoint.gpu for endpoint in endpoints}
    return same_host(name, endpoints) and len(gpus) == 1 and "" not in gpus


def same_host(name: str, endpoints: Sequence[TransferEndpoint]) -> bool:
    return len({endpoint.memory for endpoint in endpoints} - {""}) <= 1


def supported_by_all(name: str, endpoints: Sequence[TransferEndpoint]) -> bool:
    """Any hosts, where each process has opened the transport and says so in discovery."""
    return all(name in endpoint.transports for endpoint in endpoints)


def same_folder(name: str, endpoints: Sequence[TransferEndpoint]) -> bool:
    """Any hosts that have opened the same folder: a path may be another folder on each host."""
    folders = {endpoint.folder for endpoint in endpoints}
    return supported_by_all(name, endpoints) and len(folders) == 1 and "" not in folders


def anywhere(name: str, endpoints: Sequence[TransferEndpoint]) -> bool:
    return True


class TransportContext(Struct, frozen=True):
    """What a process opens its transports with."""

    owner: str  # worker id
    epoch: int
    host: str = "127.0.0.1"  # the address at which other hosts reach this process
    settings: Mapping[str, str] = {}  # those that entries name, by name
    only: bool = False  # --transport names it: move also what could be read in place
    find: Callable[[str], Any] | None = None  # another transport of this process, by name


class TransportEntry(Struct, frozen=True):
    """One transport. ``reaches``: whether processes can read each other's tickets by it."""

    name: str
    about: str  # for --help
    reaches: Callable[[str, Sequence[TransferEndpoint]], bool]
    module: str = ""  # none: TransferClient opens it by itself
    extra: str = ""  # of the wheel, with the packages it needs
    setting: str = ""  # without which it is not available
    opened_early: bool = False  # whether others rely on it only once ``open`` has succeeded
    maps_memory: bool = False  # whether a process opens memory of another on its host
    between_hosts: bool = False

    @property
    def selectable(self) -> bool:
        """Whether ``--transport`` may name it."""
        return bool(self.module)

    def open(self, context: TransportContext) -> Any:
        return importlib.import_module(self.module).open_transport(context)


_ENTRIES = (  # the best first
    TransportEntry("cuda", "in place on a GPU that all workers share", same_gpu, maps_memory=True),
    TransportEntry(
        "shm",
        "shared memory on one host",
        same_host,
        "triptych.transfer.shm",
        maps_memory=True,
    ),
    TransportEntry(
        "nixl",
        "NIXL between hosts",
        supported_by_all,
        "triptych.transfer.nixl",
        extra="nixl",
        opened_early=True,
        maps_memory=True,
        between_hosts=True,
    ),
    TransportEntry(
        "file",
        "files in a folder that all hosts share (--transfer-folder)",
        same_folder,
        "triptych.transfer.file",
        setting="transfer_folder",
        opened_early=True,
        between_hosts=True,
    ),
    TransportEntry(
        "inline",
        "in the messages themselves",
        anywhere,
        "triptych.transfer.inline",
        between_hosts=True,
    ),
)
TRANSPORTS = {entry.name: entry for entry in _ENTRIES}
SELECTABLE = tuple(entry.name for entry in _ENTRIES if entry.selectable)

if TYPE_CHECKING:
    TransportName: TypeAlias = str
else:
    TransportName = Literal[("auto", *SELECTABLE)]

TRANSPORT_HELP = (
    "how tensors travel: "
    + "; ".join(f"{name}, {TRANSPORTS[name].about}" for name in SELECTABLE)
    + "; auto takes the first that all workers can, and reads in place what lies on a GPU that "
    "they share"
)


def common_transport(endpoints: Iterable[TransferEndpoint]) -> str:
    """The best transport by which all of these can read each other's tickets."""
    known = tuple(endpoints)
    return next(entry.name for entry in _ENTRIES if entry.reaches(entry.name, known))
