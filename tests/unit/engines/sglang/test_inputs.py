"""What SGLang's scheduler is given is our own, and each tenant's."""

from __future__ import annotations

import torch

from triptych.engines.base import Media
from triptych.engines.sglang import requests
from triptych.messages import MediaMeta
from triptych.transfer.base import Array

WIDTH = 4
META = MediaMeta(b"k" * 32, 2, (1, 2, 4))


def array(*shape: int) -> Array:
    data = torch.arange(2 * WIDTH, dtype=torch.float32).view(torch.uint8).numpy().tobytes()
    return Array(memoryview(bytearray(data)), "float32", shape)


def test_embeddings_are_copied():
    source = array(2, WIDTH)
    [made, none] = requests.copy_embeddings(
        [Media(META, (source,)), Media(META, ())], torch.float32
    )
    assert none is None
    assert made is not None
    before = made.clone()
    source.buffer[:] = bytes(len(source.buffer))
    assert torch.equal(made, before)
    assert made.any()


def test_tenants_have_embeddings_of_their_own():
    names = {
        requests.salted_hash(key, salt) for key in (b"k" * 32, b"l" * 32) for salt in ("a", "b")
    }
    assert len(names) == 4
    assert all(0 <= name < 2**64 for name in names)
