"""Sources become items: in order, a few at a time, and with the place of what failed."""

from __future__ import annotations

import asyncio
import gc
import weakref
from collections.abc import Sequence
from contextlib import suppress

import pytest

from triptych.config import Config, Limits
from triptych.errors import (
    MediaFetchFailed,
    MediaNotFound,
    MediaTooLarge,
    Overloaded,
    RequestError,
    TriptychError,
)
from triptych.messages import MediaForm, MediaItem, MediaKind
from triptych.prompt.processor import MediaPart, MediaSource, PlacedMedia
from triptych.sources.budget import MediaBudget, MediaReservation
from triptych.sources.loader import MAX_PARALLEL_LOADS, MediaLoader, load_items

LIMIT = 1000  # bytes of all media of a request


class Slow:
    """Answers a source with its own name, later ones sooner; keeps how many waited together."""

    def __init__(self, *bad: str, error: type[TriptychError] = MediaFetchFailed) -> None:
        self.bad = bad
        self.error = error
        self.running = self.most = self.cancelled = 0
        self.scopes: set[str] = set()
        self.asked: list[str] = []

    def reserve(self, scope: str) -> MediaReservation:
        self.held = MediaBudget(Config(limits=Limits(request_media_bytes=LIMIT))).reserve(scope)
        return self.held

    async def load(
        self,
        source: MediaSource,
        kind: MediaKind,
        form: MediaForm,
        scope: str,
        reservation: MediaReservation,
    ) -> bytes:
        assert isinstance(source, str)
        assert reservation is self.held
        self.asked.append(source)
        self.scopes.add(scope)
        self.running += 1
        self.most = max(self.most, self.running)
        try:
            for _ in range(50 - 5 * (int(source) % 10)):
                await asyncio.sleep(0)
            if source in self.bad:
                raise self.error("no")
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        finally:
            self.running -= 1
        return f"{source} {kind} {form}".encode()


async def loaded(
    media: Sequence[PlacedMedia], sources: MediaLoader, scope: str = ""
) -> tuple[MediaItem, ...]:
    async with load_items(media, sources, scope) as made:
        return made


def placed(count: int, kind: MediaKind = "image", form: MediaForm = "file") -> list[PlacedMedia]:
    return [
        PlacedMedia(MediaPart(kind, form, str(i)), 3 * i, f"messages[0].content[{i}]")
        for i in range(count)
    ]


@pytest.mark.parametrize("count", [0, 1, 2, 3 * MAX_PARALLEL_LOADS])
async def test_items_keep_their_order_and_come_a_few_at_a_time(count: int) -> None:
    sources = Slow()
    made = await loaded(placed(count, "video", "embeds"), sources, "a\nb")
    assert made == tuple(
        MediaItem("video", 3 * i, f"{i} video embeds".encode(), "embeds") for i in range(count)
    )
    assert sources.most == min(count, MAX_PARALLEL_LOADS)
    assert sources.scopes <= {"a\nb"}


async def test_a_server_error_is_reported_unchanged() -> None:
    with pytest.raises(Overloaded):
        await loaded(placed(3), Slow("1", error=Overloaded), "")


@pytest.mark.parametrize("error", [MediaFetchFailed, MediaNotFound])
@pytest.mark.parametrize("count", [1, 5])
async def test_one_that_fails_is_named_and_ends_the_others(
    count: int, error: type[RequestError]
) -> None:
    bad = str(count - 1)
    sources = Slow(bad, error=error)
    with pytest.raises(error) as caught:
        await loaded(placed(count), sources, "")
    assert caught.value.param == f"messages[0].content[{bad}]"
    assert sources.running == 0
    assert sources.cancelled == count - 1


async def test_a_client_that_leaves_ends_all_of_them() -> None:
    sources = Slow()
    asking = asyncio.create_task(loaded(placed(4), sources, ""))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    asking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asking
    assert (sources.running, sources.cancelled) == (0, 4)


async def test_a_source_named_often_is_loaded_once_and_shared() -> None:
    sources = Slow()
    named = [
        PlacedMedia(MediaPart("image", "file", source), at, f"p{at}")
        for at, source in enumerate("1211")
    ]
    made = await loaded(named, sources)
    assert sorted(sources.asked) == ["1", "2"]
    assert [item.at for item in made] == [0, 1, 2, 3]
    assert made[0].data is made[2].data is made[3].data
    assert made[1].data == b"2 image file"
    other = PlacedMedia(
        MediaPart("video", "file", "1"), 4, "p4"
    )  # another kind is judged otherwise
    await loaded([*named, other], sources)
    assert sources.asked.count("1") == 1 + 2


@pytest.mark.parametrize("inline", [False, True])
async def test_the_media_of_a_request_are_bounded_as_often_as_they_are_named(inline: bool) -> None:
    class Large(Slow):
        async def load(
            self,
            source: MediaSource,
            kind: MediaKind,
            form: MediaForm,
            scope: str,
            reservation: MediaReservation,
        ) -> bytes:
            return source if isinstance(source, bytes) else data

    data = bytes(LIMIT // 4)
    part = MediaPart("image", "file", data if inline else "media://x")
    named = [PlacedMedia(part, at, f"messages[0].content[{at}]") for at in range(5)]
    assert len(await loaded(named[:4], Large())) == 4
    with pytest.raises(MediaTooLarge) as caught:
        await loaded(named, Large())
    assert caught.value.param == "messages[0].content[4]"


@pytest.mark.parametrize("source", [b"too large" * LIMIT, "1"])
async def test_refused_media_do_not_wait_for_the_collector(source: MediaSource) -> None:
    """They are many megabytes, and it comes seldom."""

    class Media(Slow):
        async def load(
            self,
            source: MediaSource,
            kind: MediaKind,
            form: MediaForm,
            scope: str,
            reservation: MediaReservation,
        ) -> bytes:
            if isinstance(source, str):
                return await super().load(source, kind, form, scope, reservation)
            return bytes(source)

    class Watched(bytearray):
        """Can be watched while it goes."""

    async def refused() -> weakref.ref[Watched]:
        watched = Watched(b"x")
        sources: list[MediaSource] = [memoryview(watched), source]
        named = [PlacedMedia(MediaPart("image", "file", source), 0, "p") for source in sources]
        with suppress(RequestError):
            await loaded(named, Media("1"))
            raise AssertionError("it is refused")
        return weakref.ref(watched)

    gc.disable()
    try:
        watched = await refused()
        await asyncio.sleep(0)  # the loop lets go of what is over
        assert watched() is None
    finally:
        gc.enable()
