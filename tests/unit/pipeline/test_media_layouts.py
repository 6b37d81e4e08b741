"""What answers say about media, and the block hashes that follow from it."""

import asyncio

from triptych import blocks
from triptych.messages import MediaItem, MediaMeta, MediaSpan, PreparedItem, Sampling, Work
from triptych.pipeline.kv import prompt_blocks as chains
from triptych.pipeline.kv.media_layouts import MediaLayoutCache
from triptych.pipeline.kv.prompt_blocks import hash_prompt

HOLE = 99  # a placeholder


def picture(at, data=b"picture"):
    return MediaItem("image", at, data)


def work(prompt, *media, salt=""):
    return Work("w", tuple(prompt), media, Sampling(seed=1), salt)


def test_the_layout_of_an_item_is_known_after_its_first_answer_at_any_offset():
    learned = MediaLayoutCache()
    assert learned.find(picture(0)) is None
    learned.add_spans([picture(3)], [MediaSpan(b"k", 3, 5)])
    place = learned.find(picture(7))
    assert (place.key, list(place.tokens(HOLE))) == (b"k", [HOLE] * 5)
    learned.add_spans([picture(0, b"clip")], [MediaSpan(b"v", 0, 4, (7, HOLE, 8, HOLE))])
    assert list(learned.find(picture(0, b"clip")).tokens(HOLE)) == [7, HOLE, 8, HOLE]
    learned.add_spans([picture(0, b"other")], [])  # an engine that does not report
    assert learned.find(picture(0, b"other")) is None


def test_an_encoders_meta_is_used_until_a_prompt_was_laid_out():
    learned, meta = MediaLayoutCache(), MediaMeta(b"k", 4, (1, 2, 2))
    learned.add_meta(picture(0), meta)
    assert (learned.find(picture(0)).length, learned.find(picture(0)).meta) == (4, meta)
    learned.add_spans([picture(0)], [MediaSpan(b"k", 0, 6, (1, HOLE, HOLE, HOLE, HOLE, 2))])
    learned.add_meta(picture(0), meta)
    assert (learned.find(picture(0)).length, learned.find(picture(0)).meta) == (6, meta)
    learned.add_spans([picture(0)], [MediaSpan(b"another", 0, 6)])
    assert learned.find(picture(0)).meta is None
    learned.add_meta(picture(0), meta)  # and back: the key decides
    assert learned.find(picture(0)).length == 4


def test_media_decoded_in_the_frontend_need_no_report():
    prepared = PreparedItem(MediaMeta(b"key", 3), None, 1)
    item = MediaItem("image", 0, b"", prepared=prepared)
    learned = MediaLayoutCache()
    assert learned.find(item).length == 3
    learned.add_spans([item], [MediaSpan(b"key", 0, 5)])
    assert learned.find(item).length == 5


def test_the_least_recently_used_is_forgotten():
    """Proved by leaving out the loop in ``_keep``: nothing is ever forgotten."""
    learned = MediaLayoutCache(max_items=3, max_ids=10)
    for number in range(3):
        learned.add_spans([picture(0, b"%d" % number)], [MediaSpan(b"k", 0, 1)])
    learned.find(picture(0, b"0"))
    learned.add_spans([picture(0, b"3")], [MediaSpan(b"k", 0, 1)])
    assert [bool(learned.find(picture(0, b"%d" % n))) for n in range(4)] == [1, 0, 1, 1]
    for number in range(4, 7):
        learned.add_spans([picture(0, b"%d" % number)], [MediaSpan(b"k", 0, 4, (1, 2, 3, 4))])
    assert [bool(learned.find(picture(0, b"%d" % n))) for n in range(7)] == [0, 0, 0, 0, 0, 1, 1]


async def test_a_chain_is_the_one_of_the_expanded_prompt():
    learned = MediaLayoutCache()
    learned.add_spans([picture(0)], [MediaSpan(b"k", 0, 6)])
    found = await hash_prompt(work([1, 2, 3, HOLE, 4, 5, 6, 7, 8], picture(3)), learned, 4)
    tokens = [1, 2, 3, *[HOLE] * 6, 4, 5, 6, 7, 8]
    media = [[(b"k", 3)], [(b"k", 3)], [(b"k", 3)]]
    assert found.hashes == tuple(blocks.hash_blocks(blocks.hash_salt(""), tokens, 4, media))
    assert (found.tokens, found.count, found.media_end, found.complete) == (14, 4, 9, True)


async def test_an_item_without_a_known_layout_ends_the_chain():
    """No block behind it can be cached. Proved by taking it for a plain token: three blocks."""
    learned = MediaLayoutCache()
    prompt = [1, 2, 3, 4, HOLE, 5, 6, 7, 8, 9, 10, 11]
    found = await hash_prompt(work(prompt, picture(4)), learned, 4)
    assert found.hashes == tuple(blocks.hash_blocks(blocks.hash_salt(""), [1, 2, 3, 4], 4))
    assert not found.complete
    assert found.tokens == 11 + chains.UNKNOWN_ITEM_TOKENS
    two = work(prompt, picture(1), picture(4, b"new"))
    learned.add_spans([picture(0)], [MediaSpan(b"k", 0, 3)])
    found = await hash_prompt(two, learned, 2)
    assert len(found.hashes) == 3  # 1 k k k 3 4
    assert found.media_end == 4


async def test_tenants_and_pictures_have_names_of_their_own():
    """Salt isolation: the same prompt of two tenants shares no name. Proved by ``root("")`` in
    ``chain``: all are shared."""
    learned = MediaLayoutCache()
    for data in (b"one", b"two"):
        learned.add_spans([picture(0, data)], [MediaSpan(data, 0, 8)])
    prompt = [HOLE, *range(24)]
    found = [
        set((await hash_prompt(work(prompt, picture(0, data), salt=salt), learned, 4)).hashes)
        for data, salt in ((b"one", ""), (b"one", "tenant"), (b"two", ""))
    ]
    assert len(set().union(*found)) == sum(map(len, found))


async def test_a_large_prompt_lets_the_loop_turn_and_has_the_same_names(monkeypatch):
    """Proved by leaving out the sleep: no other task gets a turn."""
    learned = MediaLayoutCache()
    learned.add_spans([picture(0)], [MediaSpan(b"k", 0, 700)])
    one = work([*range(300), HOLE, *range(500), *range(203)], picture(300))
    whole = await hash_prompt(one, learned, 16)
    turns = 0

    async def other():
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    monkeypatch.setattr(chains, "PIECE_TOKENS", 100)
    task = asyncio.create_task(other())
    assert await hash_prompt(one, learned, 16) == whole
    assert turns > 10
    task.cancel()


async def test_generated_tokens_follow_the_prompt():
    found = await hash_prompt(work([1, 2, 3]), MediaLayoutCache(), 2, generated=[4, 5, 6])
    assert found.hashes == tuple(blocks.hash_blocks(blocks.hash_salt(""), [1, 2, 3, 4, 5, 6], 2))
    assert found.cacheable == 2  # one token must be computed
