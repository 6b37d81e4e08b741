"""``triptych doctor``: checks this machine and says what is wrong and what to do about it.

Every line is ``ok``, a ``warning`` (it works, but not as well as it could) or a ``problem`` (the
server would not start, or would refuse requests). It changes nothing.

An engine may have an environment of its own. There ``python -m triptych.commands.doctor LIMITS``
prints as JSON what ``inspect_machine`` finds here: versions, GPUs, and whether media are decoded.
"""

from __future__ import annotations

import asyncio
import functools
import importlib
import importlib.metadata
import os
import platform
import resource
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
from msgspec import Struct

from triptych import __version__, requirements
from triptych.commands.launch import (
    check_access,
    check_media,
    check_threads,
    cluster_secret,
    open_checked_model,
    resolve,
)
from triptych.commands.terminal import write_stdout
from triptych.config import Config, Limits
from triptych.engines.base import ENGINES
from triptych.engines.environments import engine_python
from triptych.errors import ServiceError, StartError
from triptych.host import free_port, join_host_port, machine_memory
from triptych.media.decoder_channel import DecoderSetup
from triptych.media.decoder_process import DecoderProcess
from triptych.media.pool import MEDIA_PREPARER
from triptych.media.process_monitor import DecoderProcessLost
from triptych.media.samples import example_file
from triptych.messages import Failure, MediaItem, MediaKind
from triptych.recipe import FrameSampling, GridImage, GridVideo, MelAudio, Normalization, Recipes
from triptych.runtime.discovery import open_discovery
from triptych.runtime.gpus import GpuInfo
from triptych.transfer.client import TransferClient
from triptych.transfer.registry import TRANSPORTS

Finding = tuple[bool | None, str]  # ok or a problem (None: a warning), and the line to show
Check = Callable[[Config], Iterator[Finding]]
CHECKS: list[Check] = []  # in the order of their definition
BASE = (
    *("msgspec", "uvloop", "httptools", "pybase64", "jinja2", "tokenizers"),
    *("aiohttp", "prometheus-client", "pyyaml"),
)
PYTHONS = ((3, 11), (3, 13))  # the tested range
FEW_FILES = 4096
SMALL_SHM = 1 << 30
HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")
SHM = Path("/dev/shm")
LOOK_SECONDS = 300.0  # for another environment to import torch and decode, on a cold disk
TONE = Normalization(1.0, (0.0, 0.0, 0.0), (1.0, 1.0, 1.0))
RECIPES = Recipes(
    "",
    image=GridImage(14, 2, 28**2, 56**2, 3, TONE),
    video=GridVideo(FrameSampling("even", 0.0, 4, 1, 4, 2), 14, 2, 28**2, 56**2, True, 3, TONE),
    audio=MelAudio(16000, 400, 160, 80, 3000),
)
KIND_NAMES: dict[MediaKind, str] = {"image": "picture", "video": "clip", "audio": "sound"}
INSPECTED = ("triptych", "torch", "transformers", "av", "pillow", "numpy", "vllm", "sglang")
_MARKS = {True: "ok     ", False: "problem", None: "warning"}


class Machine(Struct, frozen=True):
    versions: dict[str, str]  # of packages that can be imported
    broken: dict[str, str]  # packages that cannot be imported: the reason
    cuda: str | None  # the CUDA version that torch is built for, or None
    gpus: tuple[GpuInfo, ...]
    decoded: dict[str, str]  # "picture", "clip", "sound": empty, or why it could not be decoded
    lacking: tuple[str, ...]  # locks of the sandbox that this kernel does not have


def run(config: Config) -> int:
    """Print every finding; the exit code is 1 if one is a problem."""
    fine = True
    for look_at in CHECKS:
        for good, line in look_at(config):
            fine &= good is not False
            write_stdout(f"{_MARKS[good]} {line}")
    return 0 if fine else 1


def _check(look_at: Check) -> Check:
    """Adds a check. A StartError that it raises is a problem."""

    @functools.wraps(look_at)
    def checked(config: Config) -> Iterator[Finding]:
        try:
            yield from look_at(config)
        except StartError as error:
            yield False, str(error)

    CHECKS.append(checked)
    return checked


@_check
def _python(_: Config) -> Iterator[Finding]:
    version, (first, last) = sys.version_info[:2], PYTHONS
    line = f"Python {platform.python_version()}, Triptych {__version__}"
    if version < first:
        yield False, f"{line}: Python {first[0]}.{first[1]} or newer is needed"
    elif version > last:
        yield None, f"{line}: not tested with this Python; use {last[0]}.{last[1]}"
    else:
        yield True, line


@_check
def _packages(config: Config) -> Iterator[Finding]:
    """Imports the packages that this Python needs."""
    needs = list(requirements.needs(config, "serve"))
    for name in dict.fromkeys((*BASE, *(name for need in needs for name in need.packages))):
        try:
            importlib.import_module(requirements.module_of(name))
            yield True, f"{name} {importlib.metadata.version(name)}"
        except ModuleNotFoundError as error:
            if error.name != requirements.module_of(name):  # a dependency of it
                yield False, f"{name} cannot be loaded: {error}"
        except (ImportError, OSError) as error:  # a shared library is missing or for another CPU
            yield False, f"{name} cannot be loaded: {error}"
    requirements.check_packages(config, "serve")


@_check
def _environment(config: Config) -> Iterator[Finding]:
    """Whether an engine with its own environment can start there."""
    kind = ENGINES.get(config.engine)
    if kind is None or not kind.package:
        return
    python = engine_python(config)
    machine = _machine(config)
    version = machine.versions.get(kind.package, "of unknown version")
    others = ", ".join(
        f"{name} {machine.versions[name]}"
        for name in ("torch", "transformers", "av", "pillow")
        if name in machine.versions
    )
    yield True, f"engine {config.engine}: {kind.package} {version} in {python} ({others})"
    for name, why in machine.broken.items():
        yield False, f"{name} cannot be loaded in {python}: {why}"
    theirs = machine.versions.get("triptych", "")
    if theirs != __version__:
        yield False, f"{python} has Triptych {theirs}, this is {__version__}: install the same"


def _machine(config: Config) -> Machine:
    """What the Python of the engine's workers has."""
    return _seen(engine_python(config), msgspec.json.encode(config.limits))


@functools.cache
def _seen(python: str, limits: bytes) -> Machine:
    if python == sys.executable:
        media = all(map(requirements.is_installed, (*requirements.MEDIA, "torch")))
        return inspect_machine(msgspec.json.decode(limits, type=Limits), media=media)
    argv = [python, "-m", "triptych.commands.doctor", limits.decode()]
    try:
        done = subprocess.run(argv, capture_output=True, timeout=LOOK_SECONDS, cwd="/")
    except (OSError, subprocess.TimeoutExpired) as error:
        raise StartError(f"--engine-python {python} cannot run: {error}") from None
    if done.returncode:
        last = done.stderr.decode(errors="replace").strip().splitlines()[-1:]
        raise StartError(f"--engine-python {python} cannot import Triptych: {''.join(last)}")
    return msgspec.json.decode(done.stdout, type=Machine)


@_check
def _devices(config: Config) -> Iterator[Finding]:
    cores, all_cores = len(os.sched_getaffinity(0)), os.cpu_count() or 1
    some = f" of {all_cores}" if cores < all_cores else ""
    yield True, f"CPU: {cores}{some} cores, {machine_memory() / 2**30:.0f} GiB of memory"
    if config.engine == "fake":
        return
    try:
        machine = _machine(config)
    except StartError:
        return
    for index, gpu in enumerate(machine.gpus):
        sizes = f"{gpu.memory / 2**30:.0f} GiB, {gpu.free / 2**30:.0f} free"
        full = gpu.free < gpu.memory / 2 and config.device != "cpu"
        hint = ": another process uses it" if full else ""
        yield None if full else True, f"GPU cuda:{index}: {gpu.name}, {sizes}{hint}"
    yield from _no_gpu(config, machine)


def _no_gpu(config: Config, machine: Machine) -> Iterator[Finding]:
    """Reports a machine without a GPU."""
    torch = machine.versions.get("torch")
    if machine.gpus or torch is None:
        return
    has_driver = Path("/dev/nvidiactl").exists()
    why = f"torch {torch} is built for CPUs" if machine.cuda is None else f"torch {torch} sees none"
    if config.device.startswith("cuda"):
        yield (
            False,
            f"device {config.device}: no GPU ({why}). Use --device cpu, or install its driver",
        )
    elif has_driver and config.device == "auto":
        yield (
            None,
            f"an NVIDIA driver is installed, but {why}: install torch for CUDA to use the GPU",
        )
    else:
        yield True, f"device {config.device}: the CPU ({why})"


@_check
def _shared_memory(config: Config) -> Iterator[Finding]:
    """Whether a child can open our memfd, as workers open each other's."""
    transport = TRANSPORTS.get(config.transport)  # none: auto
    if transport is None or transport.maps_memory:
        fd = os.memfd_create("triptych-doctor")
        try:
            os.write(fd, b"triptych")
            path = f"/proc/{os.getpid()}/fd/{fd}"
            code = f"import sys; sys.exit(open({path!r}, 'rb').read() != b'triptych')"
            done = subprocess.run([sys.executable, "-c", code], capture_output=True)
        finally:
            os.close(fd)
        good = done.returncode == 0
        hint = ": processes may not open each other's memory here; use --transport inline"
        yield good, f"shared memory between processes{'' if good else hint}"
    if transport is not None and transport.opened_early:
        try:  # what follows is to be checked too
            asyncio.run(_open_transport(config))
            yield True, f"transport {transport.name} opens"
        except StartError as error:
            yield False, str(error)
    if SHM.is_dir():
        size, _, free = shutil.disk_usage(SHM)
        small = free < SMALL_SHM and bool(ENGINES[config.engine].package)
        hint = f": {config.engine} may need more; give a container --shm-size=8g" if small else ""
        sizes = f"{size / 2**30:.1f} GiB, {free / 2**30:.1f} free"
        yield None if small else True, f"{SHM} {sizes}{hint}"


async def _open_transport(config: Config) -> None:
    transfers = TransferClient.from_config(config, "doctor", 0)
    try:
        await transfers.check_transports()
    finally:
        await transfers.close()


@_check
def _kernel(_: Config) -> Iterator[Finding]:
    """Limits on open files, and transparent huge pages."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    few = hard != resource.RLIM_INFINITY and hard < FEW_FILES
    hint = ": each connection and segment takes one; raise it (ulimit -Hn 65536)" if few else ""
    yield None if few else True, f"open files: at most {hard}{hint}"
    try:
        chosen = HUGE_PAGES.read_text().partition("[")[2].partition("]")[0]
    except OSError:
        return
    hint = f": large tensors map more slowly; write madvise to {HUGE_PAGES}"
    never = chosen == "never"
    yield None if never else True, f"transparent huge pages: {chosen}{hint if never else ''}"


@_check
def _decoding(config: Config) -> Iterator[Finding]:
    """Whether the sandbox decodes a picture, a clip and a sound, and how it is locked down."""
    if config.engine == "fake" and not config.fake.decode:
        return
    try:
        machine = _machine(config)
    except StartError:
        return  # reported already
    for what, why in machine.decoded.items():
        if why:
            yield False, f"cannot decode a {what}: {why}"
        else:
            yield True, f"a {what} is decoded in the sandbox"
    if machine.lacking:
        lacking = ", ".join(machine.lacking)
        yield None, f"the sandbox lacks {lacking}: SECURITY.md says what this leaves open"
    elif machine.decoded:
        yield True, "seccomp and Landlock lock the sandbox"


@_check
def _model(config: Config) -> Iterator[Finding]:
    if not config.model and config.engine == "fake":
        yield True, "no model named: engine fake needs none"
        return
    config = resolve(config)
    model = open_checked_model(config)
    check_media(config)
    check_threads(config)
    yield True, f"model {model.name}: {model.family}, context {model.context}"


@_check
def _port(config: Config) -> Iterator[Finding]:
    free_port(config.host, config.port)
    free_port(config.worker_host, 0, "--worker-host")
    yield True, f"{join_host_port(config.host, config.port)} is free"


@_check
def _access(config: Config) -> Iterator[Finding]:
    """How clients reach the server, where that is more than a port."""
    check_access(config)
    for flag, path in (("--tls-cert", config.tls_cert), ("--keys-file", config.keys_file)):
        if path:
            yield True, f"{flag} {path} can be used"


@_check
def _joining(config: Config) -> Iterator[Finding]:
    """Whether NATS answers at --join."""
    if not config.join:
        return

    async def look_there() -> int:
        async with open_discovery(config, "doctor", cluster_secret()) as discovery:
            return len(await discovery.view())

    workers = asyncio.run(look_there())
    yield True, f"NATS at {config.join}: namespace {config.namespace} has {workers} workers"


def inspect_machine(limits: Limits, *, media: bool) -> Machine:
    versions, broken = _import_packages()
    cuda, gpus = _find_gpus() if "torch" in versions else (None, ())
    decoded, lacking = _decode_samples(limits) if media else ({}, ())
    return Machine(versions, broken, cuda, gpus, decoded, lacking)


def _import_packages() -> tuple[dict[str, str], dict[str, str]]:
    versions, broken = {}, {}
    for name in INSPECTED:
        try:
            version = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
        if name in ("vllm", "sglang"):  # the import takes many seconds; the worker tries it
            versions[name] = version
            continue
        try:
            importlib.import_module(requirements.module_of(name))
            versions[name] = version
        except (ImportError, OSError) as error:  # a shared library is missing or for another CPU
            broken[name] = str(error)
    return versions, broken


def _find_gpus() -> tuple[str | None, tuple[GpuInfo, ...]]:
    """The GPUs that torch sees: the driver may list some that this torch cannot use."""
    import torch

    if not torch.cuda.is_available():
        return torch.version.cuda, ()
    found = []
    for index in range(torch.cuda.device_count()):
        free, total = torch.cuda.mem_get_info(index)
        found.append(GpuInfo(torch.cuda.get_device_name(index), total, free))
    return torch.version.cuda, tuple(found)


def _decode_samples(limits: Limits) -> tuple[dict[str, str], tuple[str, ...]]:
    """Decode each kind in the sandbox; a sandbox that ends is replaced for the next kind."""
    decoded: dict[str, str] = {}
    child, lacking = None, tuple[str, ...]()
    setup = DecoderSetup(RECIPES, limits, False, MEDIA_PREPARER)
    for kind, what in KIND_NAMES.items():
        try:
            child = child or DecoderProcess(setup)
            lacking = child.lacking
            made = child.prepare(MediaItem(kind, 0, example_file(kind)), lambda held: held.clear())
            decoded[what] = made.message if isinstance(made, Failure) else ""
        except (DecoderProcessLost, OSError, ServiceError) as error:
            child, decoded[what] = None, str(error)
    if child is not None:
        child.close()
    return decoded, lacking


if __name__ == "__main__":
    limits = msgspec.json.decode(sys.argv[1], type=Limits)
    sys.stdout.buffer.write(msgspec.json.encode(inspect_machine(limits, media=True)))
