"""Which device each worker of a topology uses, and its share of a GPU that several workers use.

A pure computation: it looks at no hardware and starts nothing.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from triptych.errors import InvalidConfig
from triptych.runtime.gpus import GpuInfo, GpuInventory
from triptych.topology import Role, Topology

USABLE_SHARE = 0.9  # of a GPU's memory, for all its workers together
ENCODER, LANGUAGE = 1, 3  # the weight of an E worker with the built-in encoder, and of all others
_NUMBERS = re.compile(r"cuda:(\d{1,3})(?:-(\d{1,3}))?")


@dataclass(frozen=True)
class WorkerSpec:
    """What the placement of a worker depends on."""

    role: Role
    index: int
    gpus: int = 1  # how many it uses
    weight: int = LANGUAGE

    @property
    def id(self) -> str:
        return f"{self.role}-{self.index}"


@dataclass(frozen=True)
class Placement:
    """Where a worker runs."""

    worker: WorkerSpec
    device: str  # as the worker's --device names it: cpu, cuda:1, cuda:2-3
    gpus: tuple[int, ...] = ()
    share: float = 0.0  # of each GPU's memory; 0: no other worker uses them


def worker_specs(
    topology: Topology, *, width: int = 1, own_encoder: bool = False
) -> list[WorkerSpec]:
    """``width``: GPUs of one engine. ``own_encoder``: E workers run the engine's own too."""
    found = []
    for role, index in topology.workers:
        built_in = role == "E" and not own_encoder
        gpus, weight = (1, ENCODER) if built_in else (width, LANGUAGE)
        found.append(WorkerSpec(role, index, gpus, weight))
    return found


def place_workers(
    wanted: Sequence[WorkerSpec],
    gpus: GpuInventory,
    *,
    device: str,
    devices: str,
    share: float = 0.0,
) -> list[Placement]:
    """One place per worker, in the order of ``wanted``. ``share``: of every worker; 0: by weight.

    Workers that ``devices`` names go where it says. The others spread over the GPUs: the heaviest
    first, each to the GPU with the least weight for its memory.
    """
    named = _read(devices, wanted, gpus)
    choices = {
        worker.role: named.get(worker.role) or _choices(device, gpus, "--device")
        for worker in wanted
    }
    load = [0] * len(gpus.found or ())
    placed: dict[str, Placement] = {}
    for worker in sorted(wanted, key=lambda worker: (worker.role not in named, -worker.weight)):
        choice = choices[worker.role]
        if worker.role in named:
            found = _in_turn(worker, choice)
        else:
            found = _least_loaded(worker, choice, gpus, load)
        for number in found.gpus:
            load[number] += worker.weight
        placed[worker.id] = found
    _check_sum(placed.values(), share)
    return [_with_share(placed[worker.id], load, share) for worker in wanted]


def gpu_numbers(device: str) -> tuple[int, ...]:
    """The GPUs that ``cuda:1``, ``cuda:2-3`` or ``cuda:0,2-3`` names; none: another device."""
    if not device.startswith("cuda:"):
        return ()
    found: list[int] = []
    for part in device.removeprefix("cuda:").split(","):
        match = _NUMBERS.fullmatch(f"cuda:{part.removeprefix('cuda:')}")
        if match is None or (match[2] and int(match[2]) < int(match[1])):
            raise InvalidConfig(f"device '{device}' is unknown; say cpu, cuda, cuda:1 or cuda:2-3")
        found += range(int(match[1]), int(match[2] or match[1]) + 1)
    return tuple(found)


def describe_placements(places: Sequence[Placement], gpus: GpuInventory) -> list[str]:
    """A line per device: what it is, and which workers run there with which share of its memory."""
    lines = []
    for device in dict.fromkeys(place.device for place in places):
        there = [place for place in places if place.device == device]
        ids = ", ".join(
            place.worker.id + (f" {place.share:.0%}" if place.share else "") for place in there
        )
        about = gpus.why if device == "cpu" else _described(there[0].gpus, gpus)
        memory = " of its memory" if there[0].share else ""
        lines.append(f"{device}{about and f' ({about})'}: {ids}{memory}")
    return lines


def refuse_devices(devices: str, placer: str) -> None:
    """Refuse --devices where ``placer`` assigns the GPUs."""
    if devices:
        raise InvalidConfig(
            f"--devices {devices} names GPUs of this machine, and {placer} has its own: leave it "
            "out"
        )


DeviceChoice = str | list[int]  # a device that is not a GPU, or the numbers of GPUs


def _read(
    devices: str, wanted: Sequence[WorkerSpec], gpus: GpuInventory
) -> dict[str, DeviceChoice]:
    """``E=cpu,P=cuda:0,D=cuda:1-2,cuda:4``: a part without a role goes on with the one before."""
    roles = list(dict.fromkeys(worker.role for worker in wanted))
    parts: dict[str, list[str]] = {}
    role = ""
    for part in filter(None, (word.strip() for word in devices.split(","))):
        name, equals, device = (word.strip() for word in part.rpartition("="))
        if equals and name not in roles:
            raise InvalidConfig(
                f"--devices {part}: there is no role {name}, but {', '.join(roles)}"
            )
        if (equals and name in parts) or not (role or equals):
            raise InvalidConfig(
                f"--devices '{devices}' cannot be read at '{part}'. Write it as "
                "E=cpu,P=cuda:0,D=cuda:1-3, each role once."
            )
        role = name or role
        parts.setdefault(role, []).append(device)
    return {role: _joined(role, found, wanted, gpus) for role, found in parts.items()}


def _joined(
    role: str, parts: list[str], wanted: Sequence[WorkerSpec], gpus: GpuInventory
) -> DeviceChoice:
    """The devices of one role together; refused where its workers cannot use them."""
    flag = f"--devices {role}={','.join(parts)}"
    found = [_choices(part, gpus, flag) for part in parts]
    if len(found) == 1 and isinstance(found[0], str):
        return found[0]
    together = [number for choice in found if isinstance(choice, list) for number in choice]
    if any(isinstance(choice, str) for choice in found) or len(set(together)) < len(together):
        raise InvalidConfig(f"{flag}: give a role either cpu or GPUs, each once")
    mine = [worker for worker in wanted if worker.role == role]
    width, most = mine[0].gpus, mine[0].gpus * len(mine)
    if len(together) % width:
        raise InvalidConfig(f"{flag}: a worker takes {width} GPUs, and {len(together)} are named")
    if len(together) > most and parts != ["cuda"]:
        raise InvalidConfig(
            f"{flag} names {len(together)} GPUs, and {len(mine)} {role} worker(s) use {most}: "
            f"name fewer, or ask for more workers, as in --pattern with {role}*{len(together)}"
        )
    return together


def _choices(device: str, gpus: GpuInventory, flag: str) -> DeviceChoice:
    """What a device stands for; refused where it is not there."""
    if device == "cpu" or (gpus.found is None and device in ("auto", "cuda")):
        return device
    if device in ("auto", "cuda"):
        if gpus.found:
            return list(range(len(gpus.found)))
        if device == "auto":
            return "cpu"
        raise InvalidConfig(f"{flag}: device '{device}' is not there: {gpus.why}. Say cpu.")
    given = gpu_numbers(device)
    if not given:
        raise InvalidConfig(f"{flag}: device '{device}' is unknown; say cpu, cuda or cuda:1")
    if gpus.found is None:
        return device
    if max(given) >= len(gpus.found):
        have = ", ".join(
            f"cuda:{number} ({_described((number,), gpus)})" for number in range(len(gpus.found))
        )
        there = f"there are {have}" if have else f"{gpus.why}. Say cpu"
        raise InvalidConfig(f"{flag}: device '{device}' is not there: {there}")
    return list(given)


def _in_turn(worker: WorkerSpec, choice: DeviceChoice) -> Placement:
    """The workers of a role go round the GPUs that were named for them."""
    if isinstance(choice, str):
        return Placement(worker, choice)
    first = worker.index * worker.gpus % len(choice)
    return _on(worker, tuple(choice[first : first + worker.gpus]))


def _least_loaded(
    worker: WorkerSpec, choice: DeviceChoice, gpus: GpuInventory, load: list[int]
) -> Placement:
    if isinstance(choice, str):
        return Placement(worker, choice)
    width = worker.gpus
    if width > len(choice):
        raise InvalidConfig(f"{worker.id} takes {width} GPUs, and there are {len(choice)}")
    found = gpus.found or ()

    def busy(block: tuple[int, ...]) -> float:
        return max(load[number] / found[number].memory for number in block)

    blocks = [tuple(choice[at : at + width]) for at in range(0, len(choice) - width + 1, width)]
    return _on(worker, min(blocks, key=busy))


def _on(worker: WorkerSpec, found: tuple[int, ...]) -> Placement:
    return Placement(worker, f"cuda:{','.join(_ranges(found))}", found)


def _ranges(found: tuple[int, ...]) -> Iterator[str]:
    """0, 2, 3 as ``0`` and ``2-3``."""
    first = last = found[0]
    for number in (*found[1:], -1):
        if number == last + 1:
            last = number
            continue
        yield str(first) if first == last else f"{first}-{last}"
        first = last = number


def _check_sum(places: Iterable[Placement], share: float) -> None:
    crowded = Counter(number for place in places for number in place.gpus)
    for number, count in sorted(crowded.items()):
        if count * share > 1:
            raise InvalidConfig(
                f"--gpu-memory-utilization {share:g}: cuda:{number} has {count} workers, which "
                f"together would take {count * share:.0%} of it"
            )


def _with_share(place: Placement, load: list[int], share: float) -> Placement:
    """By weight, on the busiest of its GPUs. Alone there, the engine decides for itself."""
    if not place.gpus:
        return place
    if share:
        return replace(place, share=share)
    weight = place.worker.weight
    most = max(load[number] for number in place.gpus)
    return place if most == weight else replace(place, share=_rounded(USABLE_SHARE * weight / most))


def _rounded(share: float) -> float:
    return int(share * 1000) / 1000  # down: together they stay below


def _described(found: tuple[int, ...], gpus: GpuInventory) -> str:
    """``NVIDIA H200, 139 GiB``."""
    if not found or not gpus.found:
        return ""
    gpu: GpuInfo = gpus.found[found[0]]
    return f"{gpu.name}, {gpu.memory / (1 << 30):.0f} GiB"
