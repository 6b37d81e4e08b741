import asyncio
import errno
import gc
import importlib.metadata
import os
import re
import signal
import socket
import subprocess
import sys
import threading

import msgspec
import pytest

from support.decoding import RECIPES, children, descriptors, item, maps, pool, told
from triptych.config import Limits
from triptych.errors import (
    AudioTooLong,
    BrokenInstallation,
    DecoderLost,
    Draining,
    InvalidMedia,
    MediaTooLarge,
    OutOfMemory,
    ServiceError,
)
from triptych.media import decode_queue, decoder_process, process_monitor, process_pool
from triptych.media import pool as pool_module
from triptych.media.decoder_channel import DecodeResult, DecoderSetup
from triptych.media.pool import default_process_count
from triptych.messages import MediaItem, MediaMeta, TensorSpec

PLACES = re.compile(r"/|0x|\.py|Traceback|Error")
MIB = 1 << 20
CRASHES = 10
BOUND = 30.0  # seconds; the machine may be busy


@pytest.fixture
async def decoding():
    decode_pool = pool()
    yield decode_pool
    await decode_pool.close()


async def until(condition):
    async with asyncio.timeout(20):
        while not condition():
            await asyncio.sleep(0.005)


def big(size, tag=0):
    """An item that is prepared to so many bytes."""
    return item("arrays", ["uint8", [size], tag])


# What comes back


async def test_arrays_come_back_whole_aligned_and_read_only(decoding):
    wanted = [["uint8", [2, 3, 5], 7], ["float32", [4], 1.5], ["uint16", [3], 0x3F80]]
    prepared = await decoding.prepare(item("arrays", *wanted, kind="video"))
    assert [(a.dtype, a.shape) for a in prepared.arrays] == [
        ("uint8", (2, 3, 5)),
        ("float32", (4,)),
        ("bfloat16", (3,)),
    ]
    pixels, floats, halves = (array.buffer for array in prepared.arrays)
    assert bytes(pixels) == b"\7" * 30
    assert floats.cast("f").tolist() == [1.5] * 4
    assert halves.cast("H").tolist() == [0x3F80] * 3
    assert prepared.meta.kind == "video"
    assert len(prepared.meta.key) == 32
    assert not prepared.encoded
    (line,) = maps()
    assert line.split()[1] == "r--s"


async def test_arrays_live_as_long_as_their_views(decoding):
    before = descriptors()
    prepared = await decoding.prepare(big(3 * MIB, 9))
    view = prepared.arrays[0].buffer[-5:]
    assert descriptors() == before or len(descriptors()) == len(before) + 1  # the process's socket
    del prepared
    assert bytes(view) == b"\t" * 5
    assert len(maps()) == 1
    del view
    await until(lambda: maps() == [])


async def test_embeds_are_said_to_be_encoded(decoding):
    assert (await decoding.prepare(item("echo", 1, form="embeds"))).encoded


async def test_a_refusal_keeps_its_kind_and_words(decoding):
    waiting = [decoding.prepare(item("refuse", "too long for us")) for _ in range(2)]
    first, second = await asyncio.gather(*waiting, return_exceptions=True)
    assert isinstance(first, AudioTooLong)
    assert first.message == "too long for us"
    assert first.param is None
    assert first is not second  # each may name its own part
    assert decoding.counters["decode_crashes"] == 0


async def test_a_process_may_blame_nothing_but_the_file(decoding):
    with pytest.raises(InvalidMedia):
        await decoding.prepare(item("refuse_otherwise"))


# Crashes


@pytest.mark.parametrize("how", ["abort", "segfault", "exit", "bug"])
async def test_b32_a_crash_fails_its_own_item_only(how):
    decode_pool = pool(processes=2)
    try:
        crash, good = await asyncio.gather(
            decode_pool.prepare(item("die", how)),
            decode_pool.prepare(item("sleep", 0.3, "unharmed")),
            return_exceptions=True,
        )
        assert isinstance(crash, InvalidMedia)
        assert not PLACES.search(crash.message), crash.message
        assert told(good) == "unharmed"
        assert told(await decode_pool.prepare(item("echo", 1))) == 1
        assert decode_pool.counters["decode_crashes"] == 2  # it is tried again, and then blamed
        assert decode_pool.counters["decoded_items"] == 2
        assert decode_pool.running == decode_pool.queued == 0
    finally:
        await decode_pool.close()


# Lost for reasons that are not the file's


async def lost_in(decode_pool, times, signals):
    """Prepare an item while the processes that have it are sent these signals."""
    task = asyncio.create_task(decode_pool.prepare(item("sleep", 0.7, "well")))
    struck = set()
    while len(struck) < times:
        await until(lambda: {child._process.pid for child in busy(decode_pool)} - struck)
        (pid,) = {child._process.pid for child in busy(decode_pool)} - struck
        for number in signals:
            os.kill(pid, number)
        struck.add(pid)
    async with asyncio.timeout(BOUND):
        return await task


def busy(decode_pool):
    return [child for child in [*decode_pool._processes._busy] if child._items]


@pytest.mark.parametrize(
    "signals", [[signal.SIGKILL], [signal.SIGTERM], [signal.SIGSTOP]], ids=lambda s: s[0].name
)
async def test_f27_a_good_file_whose_process_is_struck_from_outside_is_tried_again(
    decoding, signals
):
    assert told(await lost_in(decoding, 1, signals)) == "well"
    assert decoding.counters["decode_crashes"] == 1
    await until(lambda: len(children()) == 1)


async def test_f27_a_good_file_is_tried_twice_more_and_never_blamed(decoding):
    assert told(await lost_in(decoding, 2, [signal.SIGKILL])) == "well"
    with pytest.raises(DecoderLost) as raised:
        await lost_in(decoding, 3, [signal.SIGKILL])
    assert raised.value.status == 503
    assert decoding.counters["decode_crashes"] == 5
    assert told(await decoding.prepare(item("echo", 1))) == 1


async def test_f27_a_process_that_is_killed_as_it_starts_fails_no_item(decoding):
    task = asyncio.create_task(decoding.prepare(item("echo", 1)))
    await until(children)
    os.kill(children()[0], signal.SIGKILL)
    assert told(await task) == 1


async def test_a_process_that_does_not_get_ready_is_not_the_clients_fault(monkeypatch):
    monkeypatch.setattr(decoder_process, "DECODER_START_SECONDS", 0.1)
    decode_pool = pool(preparer="support.preparer_stuck")
    try:
        with pytest.raises(DecoderLost):
            await decode_pool.prepare(item("echo", 1))
    finally:
        await decode_pool.close()


async def test_no_memory_in_the_pool_itself_is_not_the_clients_fault(decoding, monkeypatch):
    def full(*words):
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr(decoder_process.DecoderProcess, "prepare", full)
        with pytest.raises(OutOfMemory):
            await decoding.prepare(item("echo", 1))
    assert told(await decoding.prepare(item("echo", 1))) == 1


def test_f27_each_cause_of_a_loss_is_counted_by_itself(monkeypatch):
    """A kill from outside and one crash are not two crashes."""
    causes = ["killed", "crashed", "killed", "crashed"]

    def lose(self, item, release):
        raise process_monitor.DecoderProcessLost("gone", causes.pop(0))

    monkeypatch.setattr(process_pool.ProcessPool, "_try", lose)
    found = process_pool.ProcessPool(None, 1)._prepare(item("echo", 1), lambda held: None)
    assert causes == []
    assert (found.result.code, found.lost) == ("invalid_media", 4)


async def test_f27_a_file_that_crashed_once_is_not_blamed(decoding):
    """As where memory was bad, or two things met that will not meet again."""
    assert told(await lost_in(decoding, 1, [signal.SIGSEGV])) == "well"


async def test_a_file_on_which_processes_hang_is_refused(decoding, monkeypatch, caplog):
    monkeypatch.setattr(process_monitor, "ASLEEP_SECONDS", 0.1)
    monkeypatch.setattr(process_monitor, "CHECK_SECONDS", 0.05)
    with pytest.raises(InvalidMedia):
        await decoding.prepare(item("sleep", 1000))
    assert caplog.text.count("it sleeps and sends no answer") == 2


async def test_a_file_that_takes_too_much_memory_is_refused(decoding):
    await decoding.prepare(item("echo", 1))
    before = children()
    with pytest.raises(MediaTooLarge, match="2048 MiB"):
        await decoding.prepare(item("allocate", 4 << 30))
    assert children() == before
    assert decoding.counters["decode_crashes"] == 0


async def test_a_machine_without_memory_is_not_the_clients_fault(decoding):
    await decoding.prepare(item("no_memory_left"))
    with pytest.raises(OutOfMemory) as raised:
        await decoding.prepare(item("die", "memory"))
    assert raised.value.status == 503
    assert decoding.counters["decode_crashes"] == 0


@pytest.mark.parametrize(
    ("error", "package"),
    [
        ("TypeError", "pillow"),
        ("AttributeError", "pillow"),
        ("ImportError", "pillow"),
        ("numpy", "numpy"),
    ],
)
async def test_a_library_that_does_not_fit_is_not_the_clients_fault(
    decoding, caplog, error, package
):
    with pytest.raises(BrokenInstallation) as raised:
        await decoding.prepare(item("mismatch", error))
    version = importlib.metadata.version(package)
    assert raised.value.status == 500
    assert f"{package} {version}" in raised.value.message
    assert "triptych doctor" in raised.value.message
    assert "Traceback" in caplog.text
    assert decoding.counters["decode_crashes"] == 0
    assert told(await decoding.prepare(item("echo", 1))) == 1


async def test_an_error_like_a_mismatch_is_the_files_fault_where_good_files_are_decoded(
    decoding, caplog
):
    for n in range(3):
        with pytest.raises(InvalidMedia, match="could not be decoded"):
            await decoding.prepare(item("type_error"), str(n))
    assert caplog.text.count("Traceback") == 1  # a client cannot fill the log
    assert decoding.counters["decode_crashes"] == 0


async def test_a_result_cannot_be_changed_after_it_was_read(decoding):
    with pytest.raises(InvalidMedia):
        await decoding.prepare(item("keep_memory"))
    assert decoding.counters["decode_crashes"] == 2
    assert told(await decoding.prepare(item("echo", 1))) == 1


async def test_no_memory_for_a_result_is_not_the_clients_fault(decoding, monkeypatch):
    def full(size):
        raise OSError(errno.ENOSPC, "no space")

    with monkeypatch.context() as patch:
        patch.setattr(decoder_process, "_create_memory", full)
        with pytest.raises(ServiceError) as raised:
            await decoding.prepare(item("echo", 1))
    assert raised.value.status == 503
    assert decoding.counters["decode_crashes"] == 0
    assert told(await decoding.prepare(item("echo", 1))) == 1
    assert len(children()) == 1


async def test_many_crashes_leave_nothing_behind():
    decode_pool = pool()
    good = await decode_pool.prepare(big(2 * MIB))
    before = len(descriptors())
    for _ in range(CRASHES):
        with pytest.raises(InvalidMedia):
            await decode_pool.prepare(item("die", "exit"))
    await until(lambda: len(children()) == 1)  # the next one, ready before it is needed
    await until(lambda: len(descriptors()) == before)
    assert len(maps()) == 1
    del good
    await until(lambda: maps() == [])
    await decode_pool.close()


async def test_a_process_that_dies_idle_fails_no_item(decoding):
    await decoding.prepare(item("echo", 1))
    (pid,) = children()
    os.kill(pid, signal.SIGKILL)
    await until(lambda: decoding._processes._idle[0]._process.poll() is not None)
    assert told(await decoding.prepare(item("echo", 2))) == 2
    assert decoding.counters["decode_crashes"] == 0


async def test_a_process_is_replaced_before_its_leaks_matter(decoding, monkeypatch):
    monkeypatch.setattr(decoder_process, "MAX_ITEMS_PER_PROCESS", 2)
    pids = [told(await decoding.prepare(item("about"), salt))["pid"] for salt in "abc"]
    assert pids[0] == pids[1] != pids[2]
    assert len(children()) == 1


async def test_the_next_process_is_started_before_it_is_needed():
    decode_pool = pool(processes=2)
    try:
        first = told(await decode_pool.prepare(item("about")))["pid"]
        await until(lambda: decode_pool._processes._spare.done())
        (second,) = {*children()} - {first}
        both = item("sleep", 0.3, 1), item("about", form="embeds")
        _, other = await asyncio.gather(*(decode_pool.prepare(one) for one in both))
        assert told(other)["pid"] in (first, second)
        assert len(children()) == 2
    finally:
        await decode_pool.close()
    assert children() == []


async def test_items_that_come_at_once_start_no_process_too_many():
    decode_pool = pool(processes=2)
    try:
        both = item("sleep", 0.2, 1), item("sleep", 0.2, 2)
        await asyncio.gather(*(decode_pool.prepare(one) for one in both))
        assert len(children()) == 2
    finally:
        await decode_pool.close()


async def test_a_lost_process_is_replaced_before_the_next_item_comes(decoding):
    with pytest.raises(InvalidMedia):
        await decoding.prepare(item("die", "exit"))
    await until(lambda: decoding._processes._spare.done())
    (next_one,) = children()
    assert told(await decoding.prepare(item("about")))["pid"] == next_one


async def test_a_process_that_has_served_for_long_has_its_successor_ready(decoding, monkeypatch):
    monkeypatch.setattr(decoder_process, "MAX_ITEMS_PER_PROCESS", 2)
    monkeypatch.setattr(decoder_process, "REPLACE_AFTER_ITEMS", 1)
    pids = []
    for salt in "abc":
        pids.append(told(await decoding.prepare(item("about"), salt))["pid"])
        if len(pids) == 2:
            await until(lambda: decoding._processes._spare.done())
            (successor,) = {*children()} - {*pids}
    assert pids[0] == pids[1] != pids[2] == successor


async def test_a_pool_that_is_closed_while_it_starts_a_process_leaves_none_behind():
    decode_pool = pool(processes=3)
    await decode_pool.prepare(item("echo", 1))
    await decode_pool.close()
    assert children() == []


async def test_a_process_that_never_starts_is_not_the_clients_fault(caplog):
    decode_pool = pool(preparer="no.such.module")
    try:
        with pytest.raises(BrokenInstallation) as raised:
            await decode_pool.prepare(item("echo", 1))
        assert not PLACES.search(raised.value.message), raised.value.message
        assert "no.such" not in raised.value.message
        assert "ModuleNotFoundError" in caplog.text
        assert children() == []
    finally:
        await decode_pool.close()


@pytest.mark.parametrize("error", [OSError(errno.EAGAIN, "not now"), RuntimeError("unforeseen")])
async def test_a_spare_that_failed_to_start_fails_no_item(decoding, monkeypatch, error):
    def fail(*words):
        raise error

    await decoding.prepare(item("echo", 1))
    with monkeypatch.context() as patch:
        patch.setattr(process_pool, "DecoderProcess", fail)
        patch.setitem(process_pool.MAX_LOSSES, "crashed", 1)
        with pytest.raises(InvalidMedia):
            await decoding.prepare(item("die", "exit"))
        await until(lambda: decoding._processes._spare.done())
    assert told(await decoding.prepare(item("echo", 2))) == 2


async def test_an_item_that_ends_in_an_error_of_ours_is_under_way_no_more(decoding, monkeypatch):
    def fail(*words):
        raise RuntimeError("unforeseen")

    with monkeypatch.context() as patch:
        patch.setattr(process_pool, "DecoderProcess", fail)
        with pytest.raises(RuntimeError):
            await decoding.prepare(item("echo", 1))
    assert decoding._processes._items == 0
    assert told(await decoding.prepare(item("echo", 1))) == 1


GOOD = DecodeResult(MediaMeta(bytes(32), 1), (TensorSpec("uint8", (64,), 0),), 64, 1, False)


@pytest.mark.parametrize(
    "change",
    [
        {"size": 0, "parts": ()},
        {"size": 1 << 40},
        {"size": 128},
        {"meta": MediaMeta(b"short", 1)},
        {"meta": MediaMeta(bytes(32), 1, (), "audio")},
        {"meta": MediaMeta(bytes(32), 0)},
        {"meta": MediaMeta(bytes(32), 10**9)},
        {"cost": 10**9},
        {"cost": -1},
        {"parts": (TensorSpec("uint8", (64,), 64),)},
        {"parts": (TensorSpec("uint8", (64,), -64),)},
        {"parts": (TensorSpec("uint8", (1 << 40,), 0),)},
        {"parts": (TensorSpec("uint8", (-1, -64), 0),)},
        {"parts": (TensorSpec("object", (8,), 0),)},
    ],
)
def test_what_a_process_offers_is_measured(change):
    about = MediaItem("image", 0, b"")
    decoder_process._check_result(GOOD, about, 1 << 30)
    with pytest.raises(ValueError, match=r"."):
        decoder_process._check_result(msgspec.structs.replace(GOOD, **change), about, 1 << 30)


# Waiting and cancelling


async def test_cancelled_while_queued_it_is_never_begun(decoding):
    first = asyncio.create_task(decoding.prepare(item("sleep", 0.3)))
    await until(lambda: decoding.running == 1)
    second = asyncio.create_task(decoding.prepare(item("die", "exit")))
    await until(lambda: decoding.queued == 1)
    second.cancel()
    with pytest.raises(asyncio.CancelledError):
        await second
    assert decoding.queued == 0
    await first
    assert decoding.counters["decode_crashes"] == 0
    assert len(decoding._flights) == 0


async def test_cancelled_while_running_the_result_is_dropped(decoding):
    await decoding.prepare(item("echo", 1))
    before, pids = len(descriptors()), children()
    running = asyncio.create_task(decoding.prepare(item("sleep", 0.2, "x" * 100)))
    await until(lambda: decoding.running == 1)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert decoding.running == 1
    await until(lambda: decoding.running == 0)
    await until(lambda: maps() == [])
    assert len(descriptors()) == before
    assert children() == pids
    assert decoding.counters["decode_crashes"] == 0


async def test_requests_at_once_share_one_decoding(decoding):
    waiting = [asyncio.create_task(decoding.prepare(item("sleep", 0.2, "x"))) for _ in range(50)]
    await until(lambda: decoding.running == 1)
    waiting[0].cancel()
    results = await asyncio.gather(*waiting, return_exceptions=True)
    assert isinstance(results[0], asyncio.CancelledError)
    assert {told(result) for result in results[1:]} == {"x"}
    assert decoding.counters["decoded_items"] == 1


async def test_tenants_take_turns_whatever_salts_they_choose(decoding):
    order = []

    async def ask(tenant, number):
        await decoding.prepare(item("echo", number), f"{tenant}\n{number}")
        order.append(tenant + str(number))

    first = asyncio.create_task(ask("x", 0))
    await until(lambda: decoding.running == 1)
    waiting = [ask("a", n) for n in (1, 2, 3)] + [ask("b", n) for n in (1, 2)]
    await asyncio.gather(first, *waiting)
    assert order == ["x0", "a1", "b1", "a2", "b2", "a3"]


async def test_nothing_is_begun_while_callers_hold_too_much(decoding, monkeypatch):
    monkeypatch.setattr(decode_queue, "MAX_HELD_BYTES", MIB)
    monkeypatch.setattr(decode_queue, "RELEASE_SECONDS", 1000)
    held = await decoding.prepare(big(2 * MIB))
    second = asyncio.create_task(decoding.prepare(item("echo", 1)))
    await asyncio.sleep(0.1)
    assert decoding.queued == 1
    assert decoding.running == 0
    del held
    assert told(await second) == 1


async def test_callers_that_hold_every_permit_may_get_more(decoding, monkeypatch):
    monkeypatch.setattr(decode_queue, "MAX_HELD_BYTES", MIB)
    monkeypatch.setattr(decode_queue, "RELEASE_SECONDS", 0.05)
    held = [await decoding.prepare(big(2 * MIB, tag)) for tag in range(3)]
    assert len(held) == 3


async def test_close_ends_all():
    decode_pool = pool()
    before = len(descriptors())
    held = await decode_pool.prepare(item("echo", "still there"))
    running = asyncio.create_task(decode_pool.prepare(item("sleep", 100)))
    await until(lambda: decode_pool.running == 1 and decode_pool._processes._busy)
    queued = asyncio.create_task(decode_pool.prepare(item("echo", 2)))
    await until(lambda: decode_pool.queued == 1)
    await decode_pool.close()
    for task in (running, queued):
        with pytest.raises(Draining):
            await task
    with pytest.raises(Draining):
        await decode_pool.prepare(item("echo", 3))
    assert decode_pool.counters["decode_crashes"] == 0
    assert children() == []
    assert told(held) == "still there"
    del held
    gc.collect()
    assert maps() == []
    assert len(descriptors()) <= before


async def test_closing_with_many_items_fails_each_and_leaves_nothing():
    before = len(descriptors())
    decode_pool = pool(processes=2)
    asked = [
        asyncio.create_task(decode_pool.prepare(item("sleep", 100, number), f"{number % 3}\n"))
        for number in range(8)
    ]
    await until(lambda: (decode_pool.running, decode_pool.queued) == (2, 6))
    await until(lambda: len(busy(decode_pool)) == 2)
    async with asyncio.timeout(BOUND):
        await decode_pool.close()
        ends = await asyncio.gather(*asked, return_exceptions=True)
    assert {type(end) for end in ends} == {Draining}
    assert children() == []
    assert maps() == []
    assert len(descriptors()) <= before


async def test_closed_while_processes_start_it_does_not_wait_for_them():
    decode_pool = pool(processes=2, preparer="support.preparer_stuck")
    asked = [asyncio.create_task(decode_pool.prepare(item("echo", n))) for n in range(3)]
    await until(lambda: len(children()) == 2)
    async with asyncio.timeout(BOUND):  # much less than START_SECONDS
        await decode_pool.close()
        ends = await asyncio.gather(*asked, return_exceptions=True)
    assert {type(end) for end in ends} == {Draining}
    assert children() == []


async def test_closed_with_a_thread_that_is_stuck_it_waits_no_longer_than_it_may(monkeypatch):
    entered, release = threading.Event(), threading.Event()

    def stuck(self, item, _):
        entered.set()
        release.wait()
        self.close()
        raise process_monitor.DecoderProcessLost("at last")

    monkeypatch.setattr(decoder_process.DecoderProcess, "prepare", stuck)
    monkeypatch.setattr(pool_module, "POOL_CLOSE_SECONDS", 0.1)
    monkeypatch.setattr(process_pool, "THREADS_CLOSE_SECONDS", 0.1)
    decode_pool = pool()
    asked = [asyncio.create_task(decode_pool.prepare(item("echo", n))) for n in range(3)]
    await until(entered.is_set)
    try:
        async with asyncio.timeout(BOUND):
            await decode_pool.close()
            ends = await asyncio.gather(*asked, return_exceptions=True)
        assert {type(end) for end in ends} == {Draining}
    finally:
        release.set()
    decode_pool._processes._threads.shutdown()
    assert children() == []


def test_a_process_that_does_not_die_does_not_hold_up_the_end(monkeypatch, caplog):
    monkeypatch.setattr(decoder_process, "KILL_SECONDS", 0.1)
    one = decoder_process.DecoderProcess(DecoderSetup(RECIPES, Limits(), False, "support.preparer"))
    kill = one._process.kill
    with monkeypatch.context() as patch:
        patch.setattr(one._process, "kill", lambda: None)
        patch.setattr(one._channel, "sock", socket.socket())  # at the end of its own it would end
        one.close()
    assert "does not end" in caplog.text
    kill()
    one.close()
    assert children() == []


# The cache


async def test_the_same_file_is_decoded_once():
    decode_pool = pool(cache=MIB)
    try:
        first = await decode_pool.prepare(item("echo", 1))
        assert await decode_pool.prepare(item("echo", 1)) is first
        assert decode_pool.counters["decoded_items"] == 1
        assert decode_pool.counters["decoded_cache_hits"] == 1
        assert decode_pool.counters["decoded_cache_misses"] == 1
        assert decode_pool.counters["decoded_cache_bytes"] == first.size
    finally:
        await decode_pool.close()


async def test_the_cache_is_bounded_in_items_since_each_is_a_memory_map(monkeypatch):
    monkeypatch.setattr("triptych.media.pool.memory_map_share", lambda part: 2)
    decode_pool = pool(cache=MIB)
    try:
        for number in range(4):
            await decode_pool.prepare(item("echo", number))
        await until(lambda: len(maps()) == 2)
        assert decode_pool.counters["decoded_cache_evictions"] == 2
        assert told(await decode_pool.prepare(item("echo", 3))) == 3
        assert decode_pool.counters["decoded_cache_hits"] == 1
    finally:
        await decode_pool.close()


async def test_b41_no_hit_across_salts_kinds_or_forms():
    decode_pool = pool(cache=MIB)
    try:
        await decode_pool.prepare(item("echo", 1), "a")
        await decode_pool.prepare(item("echo", 1), "b")
        await decode_pool.prepare(item("echo", 1, kind="audio"), "a")
        await decode_pool.prepare(item("echo", 1, form="embeds"), "a")
        assert decode_pool.counters["decoded_cache_hits"] == 0
        assert decode_pool.counters["decoded_items"] == 4
    finally:
        await decode_pool.close()


async def test_a_failure_is_not_cached():
    decode_pool = pool(cache=MIB)
    try:
        for _ in range(2):
            with pytest.raises(AudioTooLong):
                await decode_pool.prepare(item("refuse", "no"))
        assert decode_pool.counters["decoded_cache_hits"] == 0
    finally:
        await decode_pool.close()


async def test_a_result_whose_request_was_cancelled_is_cached_too():
    decode_pool = pool(cache=MIB)
    try:
        running = asyncio.create_task(decode_pool.prepare(item("sleep", 0.1, 1)))
        await until(lambda: decode_pool.running == 1)
        running.cancel()
        await until(lambda: decode_pool.running == 0)
        assert told(await decode_pool.prepare(item("sleep", 0.1, 1))) == 1
        assert decode_pool.counters["decoded_items"] == 1
    finally:
        await decode_pool.close()


def test_the_pool_loads_nothing_that_decodes():
    code = (
        "import sys, triptych.media.pool; "
        "print([m for m in ('torch', 'numpy', 'PIL', 'av') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize(("cores", "processes"), [(1, 1), (2, 1), (4, 3), (9, 8), (64, 8)])
def test_a_pool_leaves_a_core_to_others_and_stays_small(cores, processes):
    assert default_process_count(cores) == processes
