"""Sources become items: in order, a few at a time, and with the place of what failed."""

from __future__ import annotations

import asyncio

import pytest

from triptych.errors import MediaFetchFailed, MediaNotFound, Overloaded, RequestError, TriptychError
from triptych.messages import Form, Kind, MediaItem
from triptych.processor.items import AT_ONCE, items
from triptych.processor.prompt import MediaPart, Placed, Source


class Slow:
    """Answers a source with its own name, later ones sooner; keeps how many waited together."""

    def __init__(self, *bad: str, error: type[TriptychError] = MediaFetchFailed) -> None:
        self.bad = bad
        self.error = error
        self.running = self.most = self.cancelled = 0
        self.scopes: set[str] = set()

    async def load(self, source: Source, kind: Kind, form: Form, scope: str) -> bytes:
        assert isinstance(source, str)
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


def placed(count: int, kind: Kind = "image", form: Form = "file") -> list[Placed]:
    return [
        Placed(MediaPart(kind, form, str(i)), 3 * i, f"messages[0].content[{i}]")
        for i in range(count)
    ]


@pytest.mark.parametrize("count", [0, 1, 2, 3 * AT_ONCE])
async def test_items_keep_their_order_and_come_a_few_at_a_time(count: int) -> None:
    sources = Slow()
    made = await items(placed(count, "video", "embeds"), sources, "a\nb")
    assert made == tuple(
        MediaItem("video", 3 * i, f"{i} video embeds".encode(), "embeds") for i in range(count)
    )
    assert sources.most == min(count, AT_ONCE)
    assert sources.scopes <= {"a\nb"}


async def test_what_is_ours_to_mend_is_told_as_it_is() -> None:
    with pytest.raises(Overloaded):
        await items(placed(3), Slow("1", error=Overloaded), "")


@pytest.mark.parametrize("error", [MediaFetchFailed, MediaNotFound])
@pytest.mark.parametrize("count", [1, 5])
async def test_one_that_fails_is_named_and_ends_the_others(
    count: int, error: type[RequestError]
) -> None:
    bad = str(count - 1)
    sources = Slow(bad, error=error)
    with pytest.raises(error) as caught:
        await items(placed(count), sources, "")
    assert caught.value.param == f"messages[0].content[{bad}]"
    assert sources.running == 0
    assert sources.cancelled == count - 1


async def test_a_client_that_leaves_ends_all_of_them() -> None:
    sources = Slow()
    asking = asyncio.create_task(items(placed(4), sources, ""))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    asking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asking
    assert (sources.running, sources.cancelled) == (0, 4)
