"""Nothing comes to SGLang's scheduler that it would die of."""

from __future__ import annotations

import pytest
import torch

from triptych.engines.base import Generation, Media
from triptych.engines.sglang import inputs
from triptych.errors import EngineFailed
from triptych.messages import MediaItem, MediaMeta, Sampling, Work
from triptych.transfer.base import Array

WIDTH = 4
META = MediaMeta(b"k" * 32, 2, (1, 2, 4))


def array(*shape: int) -> Array:
    data = torch.arange(2 * WIDTH, dtype=torch.float32).view(torch.uint8).numpy().tobytes()
    return Array(memoryview(bytearray(data)), "float32", shape)


ENCODED = Media(META, (array(2, WIDTH),))


def generation(span: str, *media: Media, items: int | None = None) -> Generation:
    given = tuple(MediaItem("image", at, b"") for at in range(items or len(media)))
    return Generation(Work("w", (1, 2, 3), given, Sampling(seed=1)), span, media)


@pytest.mark.parametrize("media", [(), (ENCODED,), (ENCODED, ENCODED)])
def test_what_is_whole_may_pass(media: tuple[Media, ...]):
    inputs.check(generation("P", *media), WIDTH)


def test_decode_needs_no_media():
    inputs.check(generation("D", Media(META, ())), WIDTH)


@pytest.mark.parametrize(
    "wrong",
    [
        Media(META, ()),
        Media(META, (array(2, WIDTH),), encoded=False),
        Media(META, (array(1, WIDTH),)),
        Media(META, (array(2, WIDTH - 1),)),
        Media(META, (array(2, WIDTH), array(2, WIDTH))),
    ],
)
def test_what_lacks_something_may_not(wrong: Media):
    with pytest.raises(EngineFailed):
        inputs.check(generation("PD", wrong), WIDTH)


def test_every_item_must_be_there():
    with pytest.raises(EngineFailed):
        inputs.check(generation("PD", ENCODED, items=2), WIDTH)


def test_embeddings_are_copied():
    source = array(2, WIDTH)
    [made, none] = inputs.own([Media(META, (source,)), Media(META, ())], torch.float32)
    assert none is None
    assert made is not None
    before = made.clone()
    source.buffer[:] = bytes(len(source.buffer))
    assert torch.equal(made, before)
    assert made.any()


def test_tenants_have_embeddings_of_their_own():
    names = {inputs.scoped(key, salt) for key in (b"k" * 32, b"l" * 32) for salt in ("a", "b")}
    assert len(names) == 4
    assert all(0 <= name < 2**64 for name in names)
