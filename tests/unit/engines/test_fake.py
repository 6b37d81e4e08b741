"""The fake engine: same tokens whatever the phases, honest hand-overs, blocks that come back."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import hashlib
import math
import weakref
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from triptych.config import Config, FakeSettings
from triptych.engines.base import Generation, LoadedEngine, Media, PrefillOutput, find_engine
from triptych.engines.fake.content import expanded_prompt
from triptych.errors import ContextLengthExceeded, EngineFailed
from triptych.media.base import PreparedMedia
from triptych.messages import Delta, KvStored, MediaItem, MediaMeta, MediaSpan, Sampling, Work
from triptych.topology import Role
from triptych.transfer.base import Array

SIZES = {"float32": 4, "uint8": 1}
CONTEXT = 512
IMAGE_ID, END_ID = 5, 6
WORDS = {"Ġhello": 0, "wor": 1, "ld": 2, "ĠÃ": 3, "<0x0A>": 4, "x": 7, "y": 8, "z": 9}


def empty(dtype: str, shape: tuple[int, ...]) -> Array:
    return Array(memoryview(bytearray(SIZES[dtype] * math.prod(shape))), dtype, shape)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    files = {
        "config.json": {
            "model_type": "fake",
            "vocab_size": 10,
            "max_position_embeddings": CONTEXT,
            "image_token_id": IMAGE_ID,
            "eos_token_id": END_ID,
        },
        "tokenizer.json": {
            "model": {"vocab": WORDS},
            "added_tokens": [{"id": 7, "content": "x", "special": True}],
        },
    }
    for name, content in files.items():
        (tmp_path / name).write_bytes(msgspec.json.encode(content))
    return tmp_path


class Bench:
    """Loads engines of the folder and closes them."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._loaded: list[LoadedEngine] = []

    def load(self, role: str = "EPD", **settings: float) -> LoadedEngine:
        fake = msgspec.convert(settings, FakeSettings)
        config = Config(model=str(self._folder), engine="fake", fake=fake)
        loaded = find_engine("fake")(config, Role(role), empty, lambda what, share: None)
        self._loaded.append(loaded)
        return loaded

    def close(self) -> None:
        for loaded in self._loaded:
            loaded.close()


@pytest.fixture
def bench(folder: Path) -> Iterator[Bench]:
    bench = Bench(folder)
    yield bench
    bench.close()


def work(
    prompt: tuple[int, ...] = (0, 1, 2), media: tuple[MediaItem, ...] = (), **sampling
) -> Work:
    return Work("w", prompt, media, Sampling(**{"seed": 1, "max_tokens": 20, **sampling}))


async def run(
    loaded: LoadedEngine, work: Work, phases: str = "PD", media=(), kv=(), first=None
) -> list[Delta | PrefillOutput]:
    assert loaded.engine is not None
    out: list[Delta | PrefillOutput] = []
    await loaded.engine.generate(Generation(work, phases, tuple(media), kv, first), out.append)
    return out


async def tokens(loaded: LoadedEngine, work: Work, media=()) -> list[int]:
    deltas = await run(loaded, work, media=media)
    return [i for delta in deltas for i in delta.ids]


async def encode(loaded: LoadedEngine, items) -> list[Media]:
    """Items that were not decoded: known by their bytes."""
    assert loaded.encoder is not None
    keys = [hashlib.sha256(item.data).digest() for item in items]
    return await loaded.encoder.encode([PreparedMedia(MediaMeta(key, 0), (), 1) for key in keys])


async def until(condition) -> None:
    while not condition():
        await asyncio.sleep(0)


async def test_phases_give_the_tokens_of_the_whole(bench):
    together, prefill, decode = bench.load("EPD"), bench.load("P"), bench.load("D")
    images = (MediaItem("image", 1, b"red"), MediaItem("image", 3, memoryview(b"blue")))
    asked = work((0, IMAGE_ID, 1, IMAGE_ID), images, max_tokens=150)
    media = await encode(together, images)
    whole = await tokens(together, asked, media)

    [prefilled] = await run(prefill, asked, "P", media)
    assert isinstance(prefilled, PrefillOutput)
    assert sum(len(array.buffer) for array in prefilled.kv) > 0
    only_metas = [Media(item.meta, ()) for item in media]
    rest = await run(decode, asked, "D", only_metas, prefilled.kv, prefilled.delta)
    assert [*prefilled.delta.ids, *(i for delta in rest for i in delta.ids)] == whole
    assert len(whole) == 150
    assert rest[-1].finish == "length"
    assert all(delta.finish is None for delta in (prefilled.delta, *rest[:-1]))
    assert all(delta.prompt is None for delta in rest)


async def test_tokens_depend_on_what_matters_and_nothing_else(bench):
    loaded = bench.load()
    red = (MediaItem("image", 0, b"red"),)
    blue = (MediaItem("image", 0, b"blue"),)
    base = await tokens(loaded, work())
    assert await tokens(bench.load(step_ms=1), work()) == base
    assert await tokens(loaded, work(max_tokens=7)) == base[:7]
    assert await tokens(loaded, work(seed=2)) != base
    assert await tokens(loaded, work((0, 1, 8))) != base
    greedy = await tokens(loaded, work(temperature=0.0))
    assert await tokens(loaded, work(temperature=0.0, seed=2)) == greedy
    seen = await tokens(loaded, work((IMAGE_ID,), red), await encode(loaded, red))
    other = await tokens(loaded, work((IMAGE_ID,), blue), await encode(loaded, blue))
    assert seen != other


async def test_only_printable_ordinary_tokens_are_made(bench):
    made = set(await tokens(bench.load(), work(max_tokens=400)))
    assert made == {0, 1, 2, 8, 9}


async def test_a_wrong_embedding_is_noticed(bench):
    loaded = bench.load()
    image = (MediaItem("image", 0, b"red"),)
    [right] = await encode(loaded, image)
    spoiled = bytearray(right.arrays[0].buffer)
    spoiled[-1] ^= 1
    wrong = Media(right.meta, (Array(memoryview(spoiled), "float32", right.arrays[0].shape),))
    for media in ([wrong], []):
        with pytest.raises(EngineFailed):
            await run(loaded, work((IMAGE_ID,), image), media=media)
    assert loaded.report().kv_blocks_free == loaded.report().kv_blocks_total


async def test_a_wrong_kv_cache_or_first_token_is_noticed(bench):
    prefill, decode = bench.load("P"), bench.load("D")
    [mine] = await run(prefill, work(), "P")
    [other] = await run(prefill, work((2, 2, 2)), "P")
    with pytest.raises(EngineFailed, match="KV"):
        await run(decode, work(), "D", (), other.kv, mine.delta)
    with pytest.raises(EngineFailed, match="KV"):
        await run(decode, work(), "D", (), (), mine.delta)
    with pytest.raises(EngineFailed, match="another first token"):
        await run(decode, work(), "D", (), mine.kv, Delta((END_ID,)))
    assert decode.report().kv_blocks_free == decode.report().kv_blocks_total


async def test_prefill_that_ends_hands_over_nothing(bench):
    [prefilled] = await run(bench.load("P"), work(max_tokens=1), "P")
    assert prefilled.kv == ()
    assert prefilled.delta.finish == "length"


async def test_streams_step_together(bench):
    loaded = bench.load(step_ms=1)
    turns: list[list[str]] = [[]]

    def emit_of(name):
        return lambda delta: turns[-1].append(name)

    def turn() -> None:  # runs between the callbacks of the engine
        turns.append([])
        if loaded.report().kv_blocks_free < loaded.report().kv_blocks_total:
            asyncio.get_running_loop().call_soon(turn)

    tasks = [
        asyncio.create_task(
            loaded.engine.generate(Generation(work((i,), max_tokens=11), "PD", ()), emit_of(i))
        )
        for i in range(4)
    ]
    await asyncio.sleep(0)  # all first tokens are out
    turn()
    await asyncio.gather(*tasks)
    assert [names for names in turns[1:] if names] == [[0, 1, 2, 3]] * 10


@pytest.mark.parametrize("step_ms", [0, 1])
async def test_blocks_follow_the_streams_length(bench, step_ms):
    loaded = bench.load(step_ms=step_ms, kv_blocks=100)
    held: list[int] = []

    def emit(delta) -> None:
        held.append(100 - loaded.report().kv_blocks_free)

    asked = work((0,) * 15, max_tokens=34)
    await loaded.engine.generate(Generation(asked, "PD", ()), emit)
    # The KV of a token is written by the step after the one that made it.
    assert held == [1, *(-(-(15 + made) // 16) for made in range(1, 34))]
    assert loaded.report().kv_blocks_free == 100


async def test_without_blocks_new_streams_wait_in_order(bench):
    loaded = bench.load(kv_blocks=4)
    order: list[int] = []

    async def stream(name: int) -> None:
        asked = work((name,) * 33, max_tokens=4)  # three blocks: one stream at a time
        await loaded.engine.generate(Generation(asked, "PD", ()), lambda delta: order.append(name))

    tasks = [asyncio.create_task(stream(name)) for name in range(3)]
    await until(lambda: order)
    assert (loaded.report().queued, loaded.report().running) == (2, 1)
    await asyncio.gather(*tasks)
    assert order == [0] * 4 + [1] * 4 + [2] * 4
    assert loaded.report().kv_blocks_free == 4


async def test_the_youngest_is_preempted_and_continues_with_the_same_tokens(bench):
    alone, crowded = bench.load(), bench.load(kv_blocks=6)
    asked = [work((i, i), max_tokens=70) for i in range(5)]  # five blocks each in the end
    expected = [await tokens(alone, one) for one in asked]
    assert await asyncio.gather(*(tokens(crowded, one) for one in asked)) == expected
    assert crowded.report().counters["preemptions"] > 0
    assert crowded.report().kv_blocks_free == 6


@pytest.mark.parametrize("ttft_ms", [0, 10_000])
async def test_cancelling_frees_everything(bench, ttft_ms):
    loaded = bench.load(step_ms=1, ttft_ms=ttft_ms, kv_blocks=4)
    waiting = asyncio.create_task(tokens(loaded, work((0,) * 40, max_tokens=24)))
    await until(lambda: loaded.report().running)
    queued = asyncio.create_task(tokens(loaded, work((1,) * 40, max_tokens=24)))
    await until(lambda: loaded.report().queued)
    for task in (queued, waiting):
        task.cancel()
    await asyncio.gather(queued, waiting, return_exceptions=True)
    assert queued.cancelled()
    assert waiting.cancelled()
    report = loaded.report()
    assert (report.queued, report.running, report.kv_blocks_free) == (0, 0, 4)


async def test_a_cancelled_prefill_holds_its_caller_no_more(bench):
    """Off: a stream that has a method of its own as an attribute."""

    class Caller(list):
        """Answers that can be watched."""

    async def ask(out):
        with contextlib.suppress(asyncio.CancelledError):
            await loaded.engine.generate(Generation(work(), "PD", ()), out.append)

    loaded, out = bench.load(ttft_ms=10_000), Caller()
    watched, task = weakref.ref(out), asyncio.create_task(ask(out))
    del out
    await until(lambda: loaded.report().running)
    gc.disable()
    try:
        task.cancel()
        await task
        del task
        await asyncio.sleep(0)
        assert watched() is None
    finally:
        gc.enable()


async def test_cancelling_one_lets_the_next_in(bench):
    loaded = bench.load(step_ms=1, kv_blocks=4)
    running = asyncio.create_task(tokens(loaded, work((0,) * 40, max_tokens=24)))
    await until(lambda: loaded.report().running)
    queued = [asyncio.create_task(tokens(loaded, work((1,) * 40, max_tokens=2))) for _ in range(2)]
    await until(lambda: loaded.report().queued == 2)
    queued[0].cancel()
    running.cancel()
    assert len(await queued[1]) == 2


async def test_a_caller_may_cancel_its_task_within_the_last_emit(bench):
    """As it does when the KV cache was revoked meanwhile: the other streams go on."""
    prefill, decode = bench.load("P"), bench.load("D", step_ms=1)
    asked = work(max_tokens=2)
    [prefilled] = await run(prefill, asked, "P")
    failed = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: failed.append(context))

    async def give_up() -> None:
        generation = Generation(asked, "D", (), prefilled.kv, prefilled.delta)
        task = asyncio.current_task()
        await decode.engine.generate(generation, lambda _: task.cancel())

    other = work(max_tokens=3)
    [ready] = await run(prefill, other, "P")
    results = await asyncio.gather(
        give_up(), run(decode, other, "D", (), ready.kv, ready.delta), return_exceptions=True
    )
    assert isinstance(results[0], asyncio.CancelledError)
    assert len(results[1]) == 2
    assert not failed
    report = decode.report()
    assert (report.running, report.kv_blocks_free) == (0, report.kv_blocks_total)


async def test_the_context_limit_is_enforced(bench):
    loaded = bench.load()
    assert len(await tokens(loaded, work((0,) * 500, max_tokens=12))) == 12
    assert len(await tokens(loaded, work((0,) * 500, max_tokens=None))) == 12
    for prompt, max_tokens in ((500, 13), (512, None)):
        with pytest.raises(ContextLengthExceeded):
            await tokens(loaded, work((0,) * prompt, max_tokens=max_tokens))
    with pytest.raises(ContextLengthExceeded):  # could never get the blocks that it needs
        await tokens(bench.load(kv_blocks=2), work((0,) * 30, max_tokens=3))
    assert loaded.report().kv_blocks_free == loaded.report().kv_blocks_total


async def test_a_stop_token_ends_the_stream(bench):
    loaded = bench.load()
    whole = await tokens(loaded, work())
    stop = whole[5]
    deltas = await run(loaded, work(stop_token_ids=(stop,)))
    assert [i for delta in deltas for i in delta.ids] == whole[: whole.index(stop) + 1]
    assert deltas[-1].finish == "stop"


async def test_the_first_delta_has_the_prompt_and_the_last_has_the_timings(bench):
    loaded = bench.load()
    image = (MediaItem("image", 1, b"red"),)
    media = await encode(loaded, image)
    asked = msgspec.structs.replace(work((0, IMAGE_ID, 2), image), return_prompt_ids=True)
    deltas = await run(loaded, asked, media=media)
    info = deltas[0].prompt
    rows = media[0].meta.tokens
    assert rows > 1
    assert info.ids == (0, *(IMAGE_ID,) * rows, 2)
    assert info.tokens == rows + 2
    assert set(deltas[0].timings) == {"queue", "prefill"}
    assert set(deltas[-1].timings) == {"decode"}
    assert all(delta.prompt is None for delta in deltas[1:])


def test_expansion_keeps_the_order_of_several_images():
    images = (MediaItem("image", 2, b""), MediaItem("image", 0, b""))
    metas = [MediaMeta(bytes(32), 3), MediaMeta(bytes(32), 2)]
    assert expanded_prompt(work((5, 1, 5), images), metas) == (5, 5, 1, 5, 5, 5)


@pytest.mark.parametrize("count", [0, 3])
async def test_logprobs_have_the_shape_that_was_asked_for(bench, count):
    loaded = bench.load()
    deltas = await run(loaded, work(logprobs=count))
    again = await run(loaded, work(logprobs=count))
    assert [delta.logprobs for delta in deltas] == [delta.logprobs for delta in again]
    for delta in deltas:
        [entry] = delta.logprobs
        assert entry.logprob < 0
        assert len(entry.top) == count
        assert len({top.id for top in entry.top}) == count
        assert list(entry.top) == sorted(entry.top, key=lambda top: -top.logprob)


async def test_encoding_batches_what_waits(bench):
    loaded = bench.load("E", encode_ms=1)
    assert loaded.engine is None
    images = [(MediaItem("image", 0, bytes([i])),) for i in range(50)]
    answers = await asyncio.gather(*(encode(loaded, one) for one in images))
    assert len({media.meta.key for [media] in answers}) == 50
    assert loaded.report().counters == {"encoded_items": 50, "encoder_batches": 1}
    assert loaded.report().parameters.language == 0


async def test_pictures_on_their_way_are_counted(bench):
    loaded = bench.load("EPD", encode_ms=20)
    first = asyncio.create_task(encode(loaded, [MediaItem("image", 0, b"a")]))
    await until(lambda: loaded.report().running)
    two = [MediaItem("image", 0, b"b"), MediaItem("image", 1, b"c")]
    second = asyncio.create_task(encode(loaded, two))
    await asyncio.sleep(0)
    assert (loaded.report().queued, loaded.report().running) == (2, 1)
    await first
    await until(lambda: not loaded.report().queued)
    assert loaded.report().running == 2
    second.cancel()
    await asyncio.wait([second])
    assert (loaded.report().queued, loaded.report().running) == (0, 0)


async def test_a_cancelled_item_does_not_stop_the_batch(bench):
    loaded = bench.load("E", encode_ms=1)
    gone = asyncio.create_task(encode(loaded, [MediaItem("image", 0, b"a")]))
    stays = asyncio.create_task(encode(loaded, [MediaItem("image", 0, b"b")]))
    await asyncio.sleep(0)
    gone.cancel()
    assert len(await stays) == 1
    assert loaded.report().counters["encoded_items"] == 1


async def test_what_was_seen_is_found_again_and_costs_no_time(bench, monkeypatch):
    """A second for a token, for which no call waits: what else takes time does not matter then."""
    loaded = bench.load(prefill_us_per_token=1e6)
    slept: list[float] = []
    pause = asyncio.sleep

    async def sleep(seconds: float) -> None:
        slept.append(seconds)
        await pause(0)

    prompt = tuple(i % 3 for i in range(100))
    monkeypatch.setattr(asyncio, "sleep", sleep)
    cold = await run(loaded, work(prompt))
    warm = await run(loaded, work((*prompt[:90], 8, 8)))
    assert (cold[0].prompt.cached, warm[0].prompt.cached) == (0, 80)
    # The second begins when the first ends, and that would be in 100 seconds.
    assert slept == [pytest.approx(100, abs=5), pytest.approx(100 + 12, abs=5)]
    assert await tokens(loaded, work(prompt)) == [i for delta in cold for i in delta.ids]
    counters = loaded.report().counters
    assert (counters["prompt_tokens"], counters["cached_tokens"]) == (292, 176)


async def test_the_whole_prompt_is_never_found(bench):
    """One token is computed: the first answer comes of it."""
    loaded = bench.load()
    for cached in (0, 16):
        deltas = await run(loaded, work((1,) * 32, max_tokens=1))
        assert deltas[0].prompt.cached == cached


async def test_answers_are_found_too(bench):
    loaded = bench.load()
    whole = await tokens(loaded, work((1,) * 20, max_tokens=60))
    deltas = await run(loaded, work((*(1,) * 20, *whole, 2)))
    assert deltas[0].prompt.cached == 64  # 79 were computed


async def test_tenants_and_pictures_have_caches_of_their_own(bench):
    loaded = bench.load()
    red, blue = (MediaItem("image", 1, b"red"),), (MediaItem("image", 1, b"blue"),)
    asked = work((0, IMAGE_ID, *(1,) * 40), red)
    found = []
    for salt, image in (("", red), ("a", red), ("", blue), ("", red)):
        salted = msgspec.structs.replace(asked, salt=salt, media=image)
        deltas = await run(loaded, salted, media=await encode(loaded, image))
        found.append(deltas[0].prompt.cached)
    assert found[:3] == [0, 0, 0]
    assert found[3] > 32


async def test_the_least_recently_used_is_evicted_first(bench):
    loaded = bench.load(kv_blocks=8)
    for number in (0, 1, 0, 2, 0, 1):  # two cached blocks each
        deltas = await run(loaded, work((number,) * 47, max_tokens=1))
        found = deltas[0].prompt.cached
        assert loaded.report().kv_blocks_free == 8
    assert found == 32
    await run(loaded, work((8,) * 100, max_tokens=1))
    cached = [
        (await run(loaded, work((number,) * 47, max_tokens=1)))[0].prompt.cached
        for number in (8, 1, 0)
    ]
    assert cached == [32, 16, 0]  # seven blocks had to be found: of 1's two, one was left


async def test_decode_caches_the_blocks_that_it_received(bench):
    prefill, decode = bench.load("P"), bench.load("D")
    asked = work((1,) * 40, max_tokens=30)
    [prefilled] = await run(prefill, asked, "P")
    assert prefilled.delta.prompt.media == ()
    await run(decode, asked, "D", (), prefilled.kv, prefilled.delta)
    [delta, *_] = await run(decode, asked)  # whatever its role, it can do both
    assert delta.prompt.cached == 32


async def test_stale_blocks_are_not_cached(bench):
    """As when a caller cancels within the first emit. Proved with all that was emitted cached."""
    prefill, decode = bench.load("P"), bench.load("D")
    asked = work((1,) * 40, max_tokens=2)
    [prefilled] = await run(prefill, asked, "P")

    async def give_up(loaded, generation) -> None:
        task = asyncio.current_task()
        await loaded.engine.generate(generation, lambda _: task.cancel())

    for loaded, generation in (
        (decode, Generation(asked, "D", (), prefilled.kv, prefilled.delta)),
        (bench.load("PD"), Generation(asked, "PD", ())),
    ):
        await asyncio.gather(give_up(loaded, generation), return_exceptions=True)
        [delta, *_] = await run(loaded, asked)
        assert delta.prompt.cached == 0


async def test_places_of_several_images(bench):
    loaded = bench.load()
    images = (MediaItem("image", 1, b"red"), MediaItem("image", 3, b"blue"))
    media = await encode(loaded, images)
    asked = work((0, IMAGE_ID, 1, IMAGE_ID, 2), images)
    deltas = await run(loaded, asked, media=media)
    first, second = (item.meta for item in media)
    assert deltas[0].prompt.media == (
        MediaSpan(first.key, 1, first.tokens),
        MediaSpan(second.key, 2 + first.tokens, second.tokens),
    )


async def test_a_preempted_stream_continues_to_report_its_blocks(bench):
    """Its blocks may have gone meanwhile, or may still be there: nothing is reported twice."""
    loaded = bench.load(kv_blocks=6)
    held: set[int] = set()

    def receive(events) -> None:
        for event in events:
            if isinstance(event, KvStored):
                assert not held & set(event.blocks)
                held.update(event.blocks)
            else:
                assert held >= set(event.blocks)
                held.difference_update(event.blocks)
            assert len(held) <= 6

    loaded.cache.listen(receive)
    await asyncio.gather(*(tokens(loaded, work((i, i), max_tokens=70)) for i in range(5)))
    assert loaded.report().counters["preemptions"] > 0
    assert held
