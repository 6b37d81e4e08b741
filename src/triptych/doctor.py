"""``triptych doctor``: looks at this machine and says what to mend. Changes nothing."""

from __future__ import annotations

import asyncio
import importlib
import importlib.metadata
import importlib.util
import os
import platform
import subprocess
import sys
from collections.abc import Callable, Iterator
from importlib import resources

from triptych.config import Config
from triptych.engines.base import ENGINES
from triptych.engines.environments import python_of
from triptych.errors import ServiceError, StartError, install
from triptych.launch import check_model, resolve, secret
from triptych.media.child import Child, ChildLost, code_folders
from triptych.media.pool import PREPARER
from triptych.media.wire import Setup
from triptych.messages import Failure, MediaItem
from triptych.recipe import GridImage, Recipes, Tone
from triptych.runtime.discovery import open_discovery
from triptych.runtime.ports import authority, free_port
from triptych.show.terminal import write

Finding = tuple[bool | None, str]  # fine or not (None: neither), and the line to show
PICTURE = "assets/examples/circles.png"
SMALLER = GridImage(14, 2, 28**2, 56**2, 3, Tone(1.0, (0.0, 0.0, 0.0), (1.0, 1.0, 1.0)))
_MARKS = {True: "ok   ", False: "MEND ", None: "note "}
_MODULES = {"pillow": "PIL", "prometheus-client": "prometheus_client"}


def run(config: Config) -> int:
    """Print every finding; the exit code says whether all are fine."""
    fine = True
    for look in CHECKS:
        for good, line in look(config):
            fine &= good is not False
            write(f"{_MARKS[good]} {line}")
    return 0 if fine else 1


def _python(_: Config) -> Iterator[Finding]:
    good = sys.version_info >= (3, 11)
    yield (
        good,
        f"Python {platform.python_version()}" + ("" if good else ": 3.11 or newer is needed"),
    )


def _packages(config: Config) -> Iterator[Finding]:
    names = ["msgspec", "uvloop", "httptools", "pybase64", "jinja2", "tokenizers"]
    names += ["aiohttp", "prometheus-client"]
    if config.engine == "torch":
        names += ["numpy", "pillow", "av", "safetensors", "torch", "transformers"]
    for name in names:
        try:
            importlib.import_module(_MODULES.get(name, name))
            yield True, f"{name} {importlib.metadata.version(name)}"
        except ModuleNotFoundError:
            yield False, f"{name} is missing: {install('torch')}"
        except (ImportError, OSError) as error:  # a library that it needs, or one for another CPU
            yield False, f"{name} cannot be loaded: {error}"


def _environment(config: Config) -> Iterator[Finding]:
    """Whether an engine that has an environment of its own can be started in it."""
    kind = ENGINES.get(config.engine)
    if kind is None or not kind.package:
        return
    try:
        python = python_of(config)
    except StartError as error:
        yield False, str(error)
        return
    yield True, f"engine {config.engine}: {kind.package} in {python}"


def _shared_memory(config: Config) -> Iterator[Finding]:
    """Whether a child can open our memfd, as workers open each other's."""
    if config.transport == "inline":
        return
    fd = os.memfd_create("triptych-doctor")
    try:
        os.write(fd, b"triptych")
        path = f"/proc/{os.getpid()}/fd/{fd}"
        code = f"import sys; sys.exit(open({path!r}, 'rb').read() != b'triptych')"
        done = subprocess.run([sys.executable, "-c", code], capture_output=True)
    finally:
        os.close(fd)
    good = done.returncode == 0
    hint = "" if good else ": a process may not open another's memory here; use --transport inline"
    yield good, f"shared memory between processes{hint}"


def _decoding(config: Config) -> Iterator[Finding]:
    """Whether a picture can be decoded where media are, and what locks that process in."""
    if config.engine != "torch" or importlib.util.find_spec("PIL") is None:
        return
    picture = resources.files("triptych").joinpath(PICTURE).read_bytes()
    setup = Setup(Recipes("", image=SMALLER), config.limits, False, PREPARER, code_folders())
    try:
        child = Child(setup)
        made = child.prepare(MediaItem("image", 0, picture), lambda held: held.clear())
        child.close()
    except (ChildLost, ServiceError, OSError) as error:
        yield False, f"no picture can be decoded here: {error}"
        return
    if isinstance(made, Failure):
        yield False, f"no picture can be decoded here: {made.message}"
    elif child.lacking:
        lacking = ", ".join(child.lacking)
        yield None, f"media are decoded without {lacking}: SECURITY.md says what that leaves open"
    else:
        yield True, "media are decoded in a process that seccomp and Landlock lock in"


def _device(config: Config) -> Iterator[Finding]:
    if config.engine != "torch" or importlib.util.find_spec("torch") is None:
        return
    import torch

    gpu = torch.cuda.is_available()
    if config.device.startswith("cuda") and not gpu:
        yield False, f"device {config.device}: torch {torch.__version__} sees no CUDA device"
    else:
        name = torch.cuda.get_device_name() if gpu else f"cpu, {os.cpu_count()} cores"
        yield True, f"device {config.device}: {name}"


def _model(config: Config) -> Iterator[Finding]:
    if not config.model and config.engine == "fake":
        yield True, "no model named: engine fake needs none"
        return
    try:
        model = check_model(resolve(config))
    except StartError as error:
        yield False, str(error)
        return
    yield True, f"model {model.name}: {model.family}, context {model.context}"


def _port(config: Config) -> Iterator[Finding]:
    try:
        free_port(config.host, config.port)
        free_port(config.worker_host, 0, "--worker-host")
    except StartError as error:
        yield False, str(error)
        return
    yield True, f"{authority(config.host, config.port)} is free"


def _joining(config: Config) -> Iterator[Finding]:
    """Whether discovery answers where others are to be joined."""
    if not config.join:
        return

    async def look() -> int:
        async with open_discovery(config, "doctor", secret()) as discovery:
            return len(await discovery.view())

    try:
        workers = asyncio.run(look())
    except StartError as error:
        yield False, str(error)
        return
    yield True, f"NATS at {config.join}: namespace {config.namespace} has {workers} workers"


CHECKS: list[Callable[[Config], Iterator[Finding]]] = [
    _python,
    _packages,
    _environment,
    _shared_memory,
    _decoding,
    _device,
    _model,
    _port,
    _joining,
]
