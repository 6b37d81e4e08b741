"""Memory that was freed comes back without the kernel clearing it again."""

from __future__ import annotations

import platform
import resource

import pytest
import torch

from triptych.engines.torch.allocator import retain_freed_memory

FLOATS = 10 << 20  # 40 MiB: glibc would give it back at once


def faults() -> int:
    """Pages that the kernel brings for a large tensor."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    torch.empty(FLOATS).fill_(1)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc can be told")
def test_what_was_freed_is_not_brought_again() -> None:
    assert retain_freed_memory()
    faults()
    pages = 4 * FLOATS // resource.getpagesize()
    assert min(faults() for _ in range(3)) < pages / 20
