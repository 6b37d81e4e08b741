"""What no engine is given: it would die of some of it."""

from __future__ import annotations

import pytest

from triptych.engines.base import Generation, Media
from triptych.engines.checks import check_embedding, check_work, max_new_tokens
from triptych.errors import ContextLengthExceeded, EngineFailed, InvalidValue
from triptych.messages import MediaItem, MediaMeta, Sampling, Work
from triptych.transfer.base import Array

WIDTH = 4
VOCABULARY = 10
META = MediaMeta(b"k" * 32, 2, (1, 2, 4))


def array(*shape: int) -> Array:
    return Array(memoryview(bytearray(8 * WIDTH)), "float32", shape)


WHOLE = Media(META, (array(2, WIDTH),))


def asked(prompt: tuple[int, ...], media: int = 0, **sampling: object) -> Work:
    items = tuple(MediaItem("image", at, b"") for at in range(media))
    return Work("w", prompt, items, Sampling(seed=1, **sampling))


def test_what_is_whole_may_pass():
    check_work(Generation(asked((0, 9), 1, logit_bias={9: 1.0}), "P", (WHOLE,)), VOCABULARY)
    check_embedding(WHOLE, WIDTH)


@pytest.mark.parametrize(
    ("work", "media", "error"),
    [
        (asked(()), (), InvalidValue),
        (asked((10,)), (), InvalidValue),
        (asked((-1,)), (), InvalidValue),
        (asked((1,), logit_bias={10: 1.0}), (), InvalidValue),
        (asked((1,), 2), (WHOLE,), EngineFailed),
    ],
)
def test_what_lacks_something_may_not(work: Work, media: tuple[Media, ...], error: type[Exception]):
    with pytest.raises(error):
        check_work(Generation(work, "PD", media), VOCABULARY)


@pytest.mark.parametrize(
    "wrong",
    [
        Media(META, ()),
        Media(META, (array(2, WIDTH),), encoded=False),
        Media(META, (array(1, WIDTH),)),
        Media(META, (array(2, WIDTH - 1),)),
        Media(META, (array(2, WIDTH), array(2, WIDTH))),
        Media(META, (Array(memoryview(bytearray(8 * WIDTH - 4)), "float32", (2, WIDTH)),)),
    ],
)
def test_an_embedding_has_a_row_for_each_token(wrong: Media):
    with pytest.raises(EngineFailed, match="must have shape"):
        check_embedding(wrong, WIDTH)


@pytest.mark.parametrize(("wanted", "most"), [(None, 6), (6, 6), (1, 1)])
def test_what_fits_the_context(wanted: int | None, most: int):
    assert max_new_tokens(asked((1,), max_tokens=wanted), 4, 10) == most


@pytest.mark.parametrize(("prompt", "wanted"), [(10, None), (4, 7), (11, 1)])
def test_what_does_not(prompt: int, wanted: int | None):
    with pytest.raises(ContextLengthExceeded):
        max_new_tokens(asked((1,), max_tokens=wanted), prompt, 10)
