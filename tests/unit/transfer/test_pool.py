from __future__ import annotations

import errno
import os
import random
import threading
import time

import pytest

from triptych.transfer.pool import SMALLEST_SEGMENT, PoolExhausted, SegmentPool, size_class
from triptych.transfer.segment import PAGE, byte_view

MIB = 1 << 20


def pool(limit: int = 64 * MIB, idle_limit: int = 16 * MIB) -> SegmentPool:
    return SegmentPool(1, limit=limit, idle_limit=idle_limit)


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_size_classes_are_few_and_tight() -> None:
    sizes = [size_class(size) for size in range(SMALLEST_SEGMENT, 4 * MIB, 4099)]
    assert sizes == sorted(sizes)
    assert len(set(sizes)) <= 4 * 6 + 1
    for size in (0, 1, SMALLEST_SEGMENT, SMALLEST_SEGMENT + 1, 3 * MIB, 3 * MIB + 1, 4 * MIB):
        given = size_class(size)
        assert given >= size
        assert given % PAGE == 0
        assert given <= max(SMALLEST_SEGMENT, size * 1.25 + PAGE)
        assert size_class(given) == given


def test_memory_comes_back_by_itself_and_is_used_again() -> None:
    shelf = pool()
    memory, segment = shelf.lend(100_000)
    nonce, view = segment.nonce, byte_view(memory)[5:6]
    del memory, segment
    assert (shelf.lent, shelf.idle) == (1, 0)
    del view
    assert (shelf.lent, shelf.idle) == (0, 1)
    again = shelf.lend(99_000)
    assert again[1].nonce == nonce
    assert (shelf.lent, shelf.idle) == (1, 0)


def test_the_longest_idle_go_first_and_take_their_descriptors() -> None:
    base = descriptors()
    shelf = pool(idle_limit=3 * MIB)
    lent = [shelf.lend(MIB) for _ in range(5)]
    nonces = [segment.nonce for _, segment in lent]
    assert descriptors() == base + 5
    while lent:
        lent.pop(0)
    assert shelf.idle == 3
    assert descriptors() == base + 3
    kept = [shelf.lend(MIB) for _ in range(3)]
    assert {segment.nonce for _, segment in kept} == set(nonces[2:])
    del kept
    shelf.close()
    assert descriptors() == base


def test_idle_segments_are_discarded(monkeypatch: pytest.MonkeyPatch) -> None:
    base, clock = descriptors(), [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    shelf = pool()
    lent = [shelf.lend(size) for size in (MIB, 100, MIB)]
    del lent[:2]
    shelf.settle()
    clock[0] = 105.0
    lent.clear()
    shelf.settle()
    clock[0] = 109.0
    shelf.trim(10)
    assert shelf.idle == 3
    clock[0] = 111.0
    shelf.trim(10)
    assert (shelf.idle, descriptors()) == (1, base + 1)
    kept = shelf.lend(MIB)
    clock[0] = 1000.0
    shelf.trim(10)
    assert shelf.bytes  # what is lent stays
    del kept
    shelf.trim(0)
    assert not shelf.bytes
    assert descriptors() == base


def test_a_limit_on_all_that_idle_memory_does_not_eat() -> None:
    shelf = pool(limit=4 * MIB)
    small = [shelf.lend(MIB) for _ in range(3)]
    with pytest.raises(PoolExhausted):
        shelf.lend(2 * MIB)
    small.clear()
    memory, _ = shelf.lend(3 * MIB)  # the idle ones are freed
    assert (shelf.lent, shelf.idle) == (1, 0)
    assert not shelf.has_discarded  # and are unmapped before new memory is asked for
    del memory


def test_where_memory_is_tight_a_larger_one_that_idles_will_do() -> None:
    """To throw it away would gain nothing for a while where others must close it first."""
    shelf = pool(limit=8 * MIB, idle_limit=8 * MIB)
    taken = [shelf.lend(size * MIB) for size in (4, 2)]
    four, two = (segment for _, segment in taken)
    taken.clear()
    lent = [shelf.lend(size) for size in (MIB, 3 * MIB, MIB)]
    assert lent[0][1] not in (four, two)  # nothing had to be freed
    assert [segment for _, segment in lent[1:]] == [four, two]
    with pytest.raises(PoolExhausted):
        shelf.lend(2 * MIB)
    assert (shelf.lent, shelf.idle) == (3, 0)


def test_one_that_is_much_larger_is_not_held_by_a_little() -> None:
    shelf = pool(limit=10 * MIB, idle_limit=10 * MIB)
    del (taken := [shelf.lend(8 * MIB)])[:]
    taken += [shelf.lend(2 * MIB) for _ in range(3)]
    assert {segment.capacity for _, segment in taken} == {2 * MIB}


def test_more_than_the_machine_has_is_not_even_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "posix_fallocate", lambda *_: pytest.fail("was tried"))
    with pytest.raises(PoolExhausted):
        pool(limit=1 << 60).lend(1 << 50)


@pytest.mark.parametrize("call", ["posix_fallocate", "memfd_create"])
def test_a_shortage_is_an_error_that_leaves_nothing(
    call: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise OSError(errno.ENOSPC, "full")

    base, shelf = descriptors(), pool(limit=MIB + PAGE)
    monkeypatch.setattr(os, call, fail)
    for _ in range(3):
        with pytest.raises(PoolExhausted):
            shelf.lend(MIB)
    assert descriptors() == base
    monkeypatch.undo()
    shelf.lend(MIB)


def test_threads_never_share_a_segment() -> None:
    shelf, clashes = pool(), []

    def use(seed: int) -> None:
        chance = random.Random(seed)
        for _ in range(200):
            memory, _ = shelf.lend(chance.choice([1, 70_000, 150_000]))
            view = byte_view(memory)[PAGE : PAGE + 8]
            view[:] = mark = chance.randbytes(8)
            if bytes(view) != mark:
                clashes.append(seed)
            del memory, view

    threads = [threading.Thread(target=use, args=(seed,)) for seed in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not clashes
    assert shelf.lent == 0
    assert shelf.idle <= 3 * 8


def test_close_locks_out_readers_and_leaves_views() -> None:
    base, shelf = descriptors(), pool()
    memory, _ = shelf.lend(1000)
    shelf.close()
    assert descriptors() == base
    byte_view(memory)[PAGE] = 9
    with pytest.raises(PoolExhausted):
        shelf.lend(1000)
    del memory
    assert (shelf.lent, shelf.idle) == (0, 0)
