"""Inspects one Python: versions, GPUs, and whether the sandbox decodes media.

``triptych doctor`` runs it in its own Python, and in the environment of an engine that has one:
``python -m triptych.commands.machine LIMITS`` prints the result as JSON. It changes nothing.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import sys

import msgspec
from msgspec import Struct

from triptych.config import Limits
from triptych.errors import ServiceError
from triptych.media.decoder_channel import DecoderSetup
from triptych.media.decoder_process import DecoderProcess, import_folders
from triptych.media.pool import MEDIA_PREPARER
from triptych.media.process_monitor import DecoderProcessLost
from triptych.media.samples import example_file
from triptych.messages import Failure, MediaItem, MediaKind
from triptych.recipe import FrameSampling, GridImage, GridVideo, MelAudio, Normalization, Recipes
from triptych.requirements import module_of
from triptych.runtime.gpus import GpuInfo

TONE = Normalization(1.0, (0.0, 0.0, 0.0), (1.0, 1.0, 1.0))
RECIPES = Recipes(
    "",
    image=GridImage(14, 2, 28**2, 56**2, 3, TONE),
    video=GridVideo(FrameSampling("even", 0.0, 4, 1, 4, 2), 14, 2, 28**2, 56**2, True, 3, TONE),
    audio=MelAudio(16000, 400, 160, 80, 3000),
)
NAMES: dict[MediaKind, str] = {"image": "picture", "video": "clip", "audio": "sound"}
NAMED = ("triptych", "torch", "transformers", "av", "pillow", "numpy", "vllm", "sglang")


class Machine(Struct, frozen=True):
    versions: dict[str, str]  # of packages that can be imported
    broken: dict[str, str]  # packages that cannot be imported: the reason
    cuda: str | None  # the CUDA version that torch is built for, or None
    gpus: tuple[GpuInfo, ...]
    decoded: dict[str, str]  # "picture", "clip", "sound": empty, or why it could not be decoded
    lacking: tuple[str, ...]  # locks of the sandbox that this kernel does not have


def inspect_machine(limits: Limits, *, media: bool) -> Machine:
    versions, broken = _import_packages()
    cuda, gpus = _find_gpus() if "torch" in versions else (None, ())
    decoded, lacking = _decode_samples(limits) if media else ({}, ())
    return Machine(versions, broken, cuda, gpus, decoded, lacking)


def _import_packages() -> tuple[dict[str, str], dict[str, str]]:
    versions, broken = {}, {}
    for name in NAMED:
        try:
            version = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
        if name in ("vllm", "sglang"):  # the import takes many seconds; the worker tries it
            versions[name] = version
            continue
        try:
            importlib.import_module(module_of(name))
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
    setup = DecoderSetup(RECIPES, limits, False, MEDIA_PREPARER, import_folders())
    for kind, what in NAMES.items():
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
