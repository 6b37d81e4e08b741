"""The GPUs that processes started from here will see, by CUDA's driver library alone.

The driver is asked in a process of its own, which ends at once: this one then holds no state of
the driver, and a driver that hangs or crashes stops nothing here. CUDA_VISIBLE_DEVICES and the
order of GPUs are the driver's to apply. Run as a program this file is that process; so it imports
nothing of Triptych.
"""

from __future__ import annotations

import ctypes
import importlib.util
import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

SECONDS = 60.0  # for a driver to start: several seconds where there are many GPUs
NO_DRIVER = "no GPU driver is installed"
NO_CUDA_BUILD = "the installed torch is built for CPUs"
_NAME = 256  # bytes


@dataclass(frozen=True)
class GpuInfo:
    """One GPU; its place in a list is the number that CUDA gives it."""

    name: str
    memory: int  # bytes in all
    free: int = 0  # bytes, where it was asked for


@dataclass(frozen=True)
class GpuInventory:
    """``found`` is None where GPUs cannot be listed. ``why``: there are none."""

    found: tuple[GpuInfo, ...] | None = ()
    why: str = ""


def visible_gpus(python: str = sys.executable, *, free: bool = False) -> GpuInventory:
    """The GPUs that the torch of this Python can use."""
    if not _has_driver():
        # AMD's, which torch calls cuda too: its GPUs are not listed here.
        return GpuInventory(None) if Path("/dev/kfd").exists() else GpuInventory((), NO_DRIVER)
    command = [python, "-P", __file__, *(["free"] if free else [])]
    try:
        asked = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS)
        answer = json.loads(asked.stdout)
    except (OSError, subprocess.TimeoutExpired, ValueError) as error:
        return GpuInventory((), f"the GPU driver does not answer: {error}")
    return GpuInventory(tuple(GpuInfo(*one) for one in answer["gpus"]), answer["why"])


def restrict_visible_gpus(numbers: tuple[int, ...]) -> None:
    """Let this process and those it starts see these GPUs alone, by their numbers until now.

    Engines count those that they see from 0, and none touches another worker's GPU.
    """
    seen = [name for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name]
    if seen and max(numbers) >= len(seen):
        raise ValueError(f"CUDA_VISIBLE_DEVICES names {len(seen)} GPUs")
    names = [seen[number] if seen else str(number) for number in numbers]
    os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(names)


def _has_driver() -> bool:
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    return True


def _main() -> None:
    gpus: list[tuple[str, int, int]] = []
    why = "" if _built_for_cuda() else NO_CUDA_BUILD
    if not why:
        try:
            gpus = _listed(free="free" in sys.argv[1:])
        except OSError as error:
            why = str(error)
    print(json.dumps({"gpus": gpus, "why": why or ("" if gpus else "the GPU driver sees no GPU")}))


def _built_for_cuda() -> bool:
    """Torch is looked for and not imported, which takes seconds. One that is not there: yes."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return True
    return (Path(spec.origin).parent / "lib" / "libtorch_cuda.so").exists()


def _listed(*, free: bool) -> list[tuple[str, int, int]]:
    library = ctypes.CDLL("libcuda.so.1")

    def call(name: str, *arguments: object) -> None:
        if code := getattr(library, name)(*arguments):
            raise OSError(f"the GPU driver refuses {name} with code {code}")

    call("cuInit", 0)
    count = ctypes.c_int()
    call("cuDeviceGetCount", ctypes.byref(count))
    listed = []
    for number in range(count.value):
        device, size, name = ctypes.c_int(), ctypes.c_size_t(), ctypes.create_string_buffer(_NAME)
        call("cuDeviceGet", ctypes.byref(device), number)
        call("cuDeviceGetName", name, _NAME, device)
        call("cuDeviceTotalMem_v2", ctypes.byref(size), device)
        left = ctypes.c_size_t()
        if free:
            context, total = ctypes.c_void_p(), ctypes.c_size_t()
            call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
            call("cuCtxPushCurrent_v2", context)
            call("cuMemGetInfo_v2", ctypes.byref(left), ctypes.byref(total))
        listed.append((name.value.decode(errors="replace"), size.value, left.value))
    return listed


if __name__ == "__main__":
    _main()
