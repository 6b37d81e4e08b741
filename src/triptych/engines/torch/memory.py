"""How much memory the torch engine takes for the KV cache, and how a CPU keeps what it frees."""

from __future__ import annotations

import ctypes

import msgspec
import torch

from triptych.checkpoint import Model
from triptych.config import Config, TorchSettings
from triptych.errors import InvalidConfig
from triptych.models.family import LanguageModel

CPU_KV_BYTES = 1 << 30  # bytes
UNSHARED_GPU_FRACTION = 0.9  # of a GPU's memory, for a worker that has the GPU to itself
TRANSFER_DIVISOR = 8  # a worker lends one part in so many of its share to others on its GPU
ACTIVATION_FRACTION = 0.2  # of what the weights leave, for the activations of a step
MIN_ACTIVATION_BYTES = 1 << 30


def block_bytes(language: LanguageModel, settings: TorchSettings) -> int:
    """The size of one KV block."""
    weight = language.embed.weight
    heads = language.layers * 2 * language.kv_heads
    return settings.block_size * heads * language.head_dim * weight.dtype.itemsize


def count_blocks(size: int, language: LanguageModel, settings: TorchSettings) -> int:
    """How many KV blocks fit into ``size`` bytes, but at least one."""
    return max(1, size // block_bytes(language, settings))


def transfer_bytes(config: Config, device: torch.device) -> int:
    """Bytes of GPU memory that the worker may lend for transfers; 0: the transport decides."""
    if config.gpu_transfer_bytes or not config.gpu_memory_utilization:
        return config.gpu_transfer_bytes
    _, total = torch.cuda.mem_get_info(device)
    return int(total * config.gpu_memory_utilization) // TRANSFER_DIVISOR


def size_kv_cache(
    config: Config, language: LanguageModel, model: Model, device: torch.device
) -> TorchSettings:
    """The engine's settings with the number of KV blocks, unless the operator set it.

    Call it after the weights are loaded.
    """
    settings = config.torch
    if settings.kv_blocks:
        return settings
    size = config.kv_cache_bytes or CPU_KV_BYTES
    if device.type == "cuda" and not config.kv_cache_bytes:
        free, total = torch.cuda.mem_get_info(device)
        share = int(total * (config.gpu_memory_utilization or UNSHARED_GPU_FRACTION))
        loaded = torch.cuda.memory_reserved(device)
        keep = transfer_bytes(config, device) or total // 16
        blocks = -(-model.context // settings.block_size) * settings.max_running
        most = blocks * block_bytes(language, settings)
        size = min(kv_cache_bytes(share, loaded, keep, free), most)
    return msgspec.structs.replace(settings, kv_blocks=count_blocks(size, language, settings))


def kv_cache_bytes(share: int, loaded: int, keep: int, free: int) -> int:
    """The size of a worker's KV cache on a GPU.

    ``share``: bytes that the worker may take in all, ``loaded``: bytes of its weights, ``keep``:
    bytes that it may lend, ``free``: bytes of the GPU that are still free.
    """
    left = min(share - loaded, free) - keep
    size = left - max(int(left * ACTIVATION_FRACTION), MIN_ACTIVATION_BYTES)
    if size <= 0:
        raise InvalidConfig(
            "the GPU has not enough memory for a KV cache: this worker may use "
            f"{share / (1 << 30):.1f} GiB, its weights take {loaded / (1 << 30):.1f}, and "
            f"{free / (1 << 30):.1f} are free. Raise --gpu-memory-utilization, or give its role a "
            "GPU of its own (--devices)."
        )
    return size


# Options of glibc's mallopt, from malloc.h.
_TRIM_THRESHOLD, _MMAP_THRESHOLD, _ARENA_MAX = -1, -3, -8
RETAINED_BYTES = 512 << 20  # free memory beyond this goes back to the kernel
MMAP_BYTES = 256 << 20  # blocks of this size, such as the KV cache, stay the kernel's


def retain_freed_memory() -> bool:
    """Keep memory that a step frees for the next step; False if the C library is not glibc.

    By default large blocks go back to the kernel, which clears every page when it gives them out
    again: a tenth of the time of a prefill. Threads that start later share what is retained.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    options = (
        (_TRIM_THRESHOLD, RETAINED_BYTES),
        (_MMAP_THRESHOLD, MMAP_BYTES),
        (_ARENA_MAX, 1),
    )
    accepted = [mallopt(name, value) == 1 for name, value in options]
    return all(accepted)
