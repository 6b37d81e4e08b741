"""How large the built-in engine makes its KV cache."""

import platform
import resource
import types

import pytest
import torch

from triptych.config import Config, TorchSettings
from triptych.engines.torch import memory
from triptych.errors import InvalidConfig

GIB = 1 << 30
LANGUAGE = types.SimpleNamespace(
    embed=torch.nn.Embedding(2, 2, dtype=torch.bfloat16), layers=28, kv_heads=4, head_dim=128
)
MODEL = types.SimpleNamespace(context=32768)


@pytest.fixture
def gpu(monkeypatch):
    """80 GiB, of which 75 are free and 15 are this worker's weights."""
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (75 * GIB, 80 * GIB))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda _: 15 * GIB)
    return torch.device("cuda")


def size(config, device):
    settings = memory.size_kv_cache(config, LANGUAGE, MODEL, device)
    return settings.kv_blocks * memory.block_bytes(LANGUAGE, settings)


def test_a_cpu_has_a_gibibyte():
    block = memory.block_bytes(LANGUAGE, Config().torch)
    assert GIB - block < size(Config(), torch.device("cpu")) <= GIB


def test_a_gpu_gives_what_its_share_leaves_after_the_weights(gpu):
    alone, shared = size(Config(), gpu), size(Config(gpu_memory_utilization=0.4), gpu)
    assert 38 * GIB < alone < 42 * GIB  # of 72, less 15 of weights, 5 to lend and a fifth to work
    assert 9 * GIB < shared < 12 * GIB  # of 32, less 15, 4 and a fifth
    assert memory.transfer_bytes(Config(), gpu) == 0
    assert memory.transfer_bytes(Config(gpu_memory_utilization=0.4), gpu) == 4 * GIB
    assert memory.transfer_bytes(Config(gpu_memory_utilization=0.4, gpu_transfer_bytes=7), gpu) == 7


def test_the_operators_number_is_used(gpu):
    block = memory.block_bytes(LANGUAGE, Config().torch)
    for asked, blocks in (
        ({"kv_cache_bytes": 64 << 20}, (64 << 20) // block),
        ({"torch": TorchSettings(kv_blocks=5)}, 5),
        ({"torch": TorchSettings(kv_blocks=5), "kv_cache_bytes": 64 << 20}, 5),
        ({"kv_cache_bytes": 1}, 1),
    ):
        config = Config(**asked, gpu_memory_utilization=0.4)
        assert memory.size_kv_cache(config, LANGUAGE, MODEL, gpu).kv_blocks == blocks


def test_it_takes_no_more_than_its_requests_can_use(gpu):
    config = Config(torch=TorchSettings(max_running=2, block_size=16))
    per_token = 28 * 2 * 4 * 128 * 2
    assert size(config, gpu) == 2 * MODEL.context * per_token


def test_it_takes_no_more_than_is_free():
    assert memory.kv_cache_bytes(70 * GIB, 10 * GIB, GIB, 20 * GIB) < 20 * GIB


def test_a_share_that_holds_the_weights_alone_is_refused(gpu):
    with pytest.raises(InvalidConfig, match=r"may use 16.0 GiB.*weights take 15.0.*--devices"):
        size(Config(gpu_memory_utilization=0.2), gpu)


FLOATS = 10 << 20  # 40 MiB: glibc would give it back at once


def faults(less: int) -> int:
    """Pages that the kernel brings for a large tensor, ``less`` floats under FLOATS.

    glibc aligns blocks by asking for a few bytes more, for which a freed block of the same size may
    be too small.
    """
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    torch.empty(FLOATS - less).fill_(1)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc can be told")
def test_freed_tensors_are_not_sent_again() -> None:
    assert memory.retain_freed_memory()
    faults(0)
    pages = 4 * FLOATS // resource.getpagesize()
    assert min(faults(less) for less in (4096, 8192, 12288)) < pages / 20
