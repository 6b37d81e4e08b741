from __future__ import annotations

import fcntl
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from triptych.transfer import segment as segment_module
from triptych.transfer.segment import (
    HUGE_PAGE_BYTES,
    MEMFD_NAME,
    PAGE,
    SLOTS,
    AttachedSegment,
    NotASegment,
    Segment,
    byte_view,
)

ME = os.getpid()


def maps() -> int:
    return Path("/proc/self/maps").read_text().count(f"memfd:{MEMFD_NAME}")


def test_both_sides_see_the_same_bytes() -> None:
    segment = Segment(65536, epoch=3)
    attached = AttachedSegment(ME, segment.fd, segment.nonce, 3)
    segment.write(100, memoryview(b"a copy"))
    byte_view(segment.memory)[PAGE + 50 : PAGE + 53] = b"map"
    assert bytes(attached.body[100:106]) == b"a copy"
    assert bytes(attached.body[50:53]) == b"map"
    assert attached.capacity == 65536


def test_large_memory_is_there_at_once_where_pages_are_huge(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With or without such pages: the machine's setting may say never. Fails without populating."""
    monkeypatch.setattr(segment_module, "huge_pages", lambda: True)
    segment = Segment(HUGE_PAGE_BYTES, epoch=3)
    assert os.fstat(segment.fd).st_blocks * 512 >= PAGE + HUGE_PAGE_BYTES
    byte_view(segment.memory)[PAGE + HUGE_PAGE_BYTES - 3 :] = b"end"
    assert bytes(AttachedSegment(ME, segment.fd, segment.nonce, 3).body[-3:]) == b"end"


@pytest.mark.parametrize(
    ("setting", "advice", "asked"),
    [
        ("always within_size [advise] never deny force", 23, True),
        ("always within_size advise [never] deny force", 23, False),
        ("always within_size [advise] never deny force", 999, False),  # a kernel that is too old
        (None, 23, False),
    ],
)
def test_huge_pages_are_asked_for_where_they_can_be_had(
    setting: str | None,
    advice: int,
    asked: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    file = tmp_path / "shmem_enabled"
    if setting is not None:
        file.write_text(setting)
    monkeypatch.setattr(segment_module, "_HUGE_SETTING", file)
    monkeypatch.setattr(segment_module, "_POPULATE_WRITE", advice)
    assert segment_module.huge_pages.__wrapped__() is asked


def test_large_memory_that_does_not_come_is_an_error_that_leaves_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(segment_module, "huge_pages", lambda: True)
    monkeypatch.setattr(segment_module, "_POPULATE_WRITE", 999)  # which no kernel knows
    descriptors, mapped = len(os.listdir("/proc/self/fd")), maps()
    with pytest.raises(OSError, match="argument"):
        Segment(HUGE_PAGE_BYTES, epoch=3)
    assert len(os.listdir("/proc/self/fd")) == descriptors
    assert maps() == mapped


def test_readers_see_the_tickets_in_the_table() -> None:
    segment = Segment(65536, epoch=3)
    attached = AttachedSegment(ME, segment.fd, segment.nonce, 3)
    slot = segment.add_ticket(2**63)
    assert attached.table[slot] == 2**63
    segment.remove_ticket(slot)
    assert attached.table[slot] == 0


def test_the_table_holds_its_stated_capacity() -> None:
    segment = Segment(65536, epoch=3)
    assert len({segment.add_ticket(serial) for serial in range(1, SLOTS + 1)}) == SLOTS
    assert not segment.shareable
    assert bytes(byte_view(segment.memory)[PAGE:]) == bytes(65536)


def test_maps_and_descriptors_end_with_their_views() -> None:
    descriptors, mapped = len(os.listdir("/proc/self/fd")), maps()
    segment = Segment(65536, epoch=3)
    attached = AttachedSegment(ME, segment.fd, segment.nonce, 3)
    assert len(os.listdir("/proc/self/fd")) == descriptors + 1  # the reader keeps none
    view = attached.body[10:20]
    del attached
    segment.close()
    del segment
    assert bytes(view) == bytes(10)
    assert maps() == mapped + 1
    del view
    assert maps() == mapped
    assert len(os.listdir("/proc/self/fd")) == descriptors


def test_alive_until_closed() -> None:
    segment = Segment(65536, epoch=3)
    attached = AttachedSegment(ME, segment.fd, segment.nonce, 3)
    assert attached.alive()
    fd = segment.fd
    segment.close()
    assert not attached.alive()
    other = Segment(65536, epoch=3)
    assert other.fd == fd  # the number again, but another segment
    assert not attached.alive()


@pytest.mark.parametrize("kind", [bytes, bytearray])
def test_copies_stay_in_their_place(kind: Callable[[bytes], bytes]) -> None:
    segment = Segment(1 << 20, epoch=3)
    data = kind(os.urandom(700_001))
    segment.write(64, memoryview(data))
    segment.write(0, memoryview(kind(b"")))
    body = byte_view(segment.memory)[PAGE:]
    assert body[64:700_065] == data
    assert bytes(body[:64]) == bytes(64)
    assert bytes(body[700_065:]) == bytes((1 << 20) - 700_065)


def test_cannot_be_cut_short() -> None:
    segment = Segment(65536, epoch=3)
    with pytest.raises(PermissionError):
        os.ftruncate(segment.fd, 0)


def _copy_of(segment: Segment, name: str, seals: int) -> int:
    fd = os.memfd_create(name, os.MFD_ALLOW_SEALING)
    os.write(fd, bytes(byte_view(segment.memory)))
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
    return fd


def _empty(_: Segment) -> int:
    fd = os.memfd_create(MEMFD_NAME, os.MFD_ALLOW_SEALING)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, 7)
    return fd


OTHERS: dict[str, Callable[[Segment], int]] = {
    "unsealed": lambda segment: _copy_of(segment, MEMFD_NAME, 0),
    "another name": lambda segment: _copy_of(segment, "someone", 7),
    "empty": _empty,
    "device": lambda _: os.open("/dev/zero", os.O_RDWR),
    "file": lambda _: os.open(__file__, os.O_RDONLY),
}


@pytest.mark.parametrize("kind", OTHERS)
def test_other_files_are_not_attached(kind: str) -> None:
    segment = Segment(65536, epoch=3)
    fd = OTHERS[kind](segment)
    before = len(os.listdir("/proc/self/fd"))
    try:
        with pytest.raises(NotASegment):
            AttachedSegment(ME, fd, segment.nonce, 3)
        assert len(os.listdir("/proc/self/fd")) == before
    finally:
        os.close(fd)


def test_a_sealed_copy_would_be_attached() -> None:
    """So that it is the difference which the test above names that is refused."""
    segment = Segment(65536, epoch=3)
    fd = _copy_of(segment, MEMFD_NAME, 7)
    AttachedSegment(ME, fd, segment.nonce, 3)
    os.close(fd)


def test_pipes_and_devices_are_not_even_opened(monkeypatch: pytest.MonkeyPatch) -> None:
    fd = os.open("/dev/zero", os.O_RDWR)
    monkeypatch.setattr(os, "open", lambda *_: pytest.fail("was opened"))
    with pytest.raises(NotASegment):
        AttachedSegment(ME, fd, bytes(16), 3)
    monkeypatch.undo()
    os.close(fd)


def test_another_identity_is_not_attached() -> None:
    segment = Segment(65536, epoch=3)
    for pid, fd, nonce, epoch in (
        (ME, segment.fd, bytes(16), 3),
        (ME, segment.fd, segment.nonce, 4),
        (ME, segment.fd, segment.nonce[:8], 3),
        (ME, segment.fd + 100, segment.nonce, 3),
        (ME, -1, segment.nonce, 3),
        (-1, segment.fd, segment.nonce, 3),
        (2**70, segment.fd, segment.nonce, 3),
        (1, segment.fd, segment.nonce, 3),
    ):
        with pytest.raises(NotASegment):
            AttachedSegment(pid, fd, nonce, epoch)


def test_a_reader_that_writes_hurts_only_itself() -> None:
    script = """
import os
from triptych.transfer.segment import AttachedSegment, Segment
segment = Segment(65536, epoch=3)
attached = AttachedSegment(os.getpid(), segment.fd, segment.nonce, 3)
attached.body[0] = 1
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, check=False)
    assert done.returncode == -signal.SIGSEGV
