"""The directory seen from its files, on a clock of the test's."""

from __future__ import annotations

import asyncio
import errno
import os
import shutil
import stat
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest

from support.disks import PlayedDisk, SmallDisk, small_disk
from triptych.errors import InvalidConfig, StartError
from triptych.host import boot_time, host_id, process_start
from triptych.messages import WorkerRecord
from triptych.runtime import run_dir
from triptych.runtime.directory import SWEEP_SECONDS, Directory, WorkerFiles
from triptych.runtime.lease import LEASE_SECONDS


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def door(tmp_path: Path, clock: Clock) -> Directory:
    return Directory(tmp_path / "workers", clock=clock)


@pytest.fixture
def directory(door: Directory) -> WorkerFiles:
    door.files.claim("P-0")
    return door.files


def record(worker: str = "P-0", epoch: int = 2_000_000) -> WorkerRecord:
    return WorkerRecord(worker, "P", epoch, "127.0.0.1:9", 42, "model")


@pytest.fixture(autouse=True)
def fast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("triptych.runtime.lease.RENEW_SECONDS", 0.05)


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not condition():
            await asyncio.sleep(0.01)


async def renewed(files: WorkerFiles, clock: Clock) -> None:
    """Wait until the lease of P-0 is as long as it can be now."""
    end = str(clock.now + LEASE_SECONDS).encode()
    await until(lambda: end in files.file("P-0").read_bytes())


def test_only_the_owner_may_look(directory: WorkerFiles) -> None:
    directory.write(record())
    assert stat.S_IMODE(directory.path.stat().st_mode) == 0o700
    for file in directory.path.iterdir():
        assert stat.S_IMODE(file.stat().st_mode) == 0o600


def test_nothing_is_left_over_but_the_newest_claim(directory: WorkerFiles) -> None:
    for _ in range(5):
        epoch = directory.claim("P-0")
        directory.write(record(epoch=epoch))
    names = {file.name for file in directory.path.iterdir()}
    assert names == {"P-0.json", f"P-0.{epoch}.claim"}


def test_claims_of_one_worker_are_not_those_of_another(directory: WorkerFiles) -> None:
    for worker in ("P-0", "P-0-1", "P-00", "P"):
        first = directory.claim(worker)
        assert directory.newest(worker) == first
        assert directory.claim(worker) == first + 1
    assert directory.newest("P-1") == 0


def test_a_lease_lives_as_long_as_it_says(directory: WorkerFiles, clock: Clock) -> None:
    directory.write(record())
    clock.now += LEASE_SECONDS - 0.1
    assert set(directory.view()) == {"P-0"}
    clock.now += 0.2
    assert directory.view() == {}


def test_a_lease_from_before_a_reboot_has_ended(directory: WorkerFiles, clock: Clock) -> None:
    directory.write(record())
    clock.now = 3.0
    assert directory.view() == {}


def test_a_changed_file_is_read_again_and_an_unchanged_one_is_not(
    directory: WorkerFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory.write(record())
    assert directory.view()["P-0"].state == "ready"
    with monkeypatch.context() as patch:
        patch.setattr(WorkerFiles, "_open", lambda self, path: 1 / 0)
        assert set(directory.view()) == {"P-0"}
    directory.write(msgspec.structs.replace(record(), state="draining"))
    assert directory.view()["P-0"].state == "draining"


def test_a_view_never_goes_back_to_an_older_epoch(directory: WorkerFiles) -> None:
    directory.write(record(epoch=9))
    assert directory.view()["P-0"].epoch == 9
    directory.write(record(epoch=8))
    assert "P-0" not in directory.view()


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"\xff\xfe\x00",
        b"[1, 2]",
        b'{"record": {"id": "\xff"}}',
        b"[" * 100_000,
        b'{"record": 1, "expires": 2}',
    ],
    ids=len,
)
def test_files_that_are_not_ours_are_ignored(directory: WorkerFiles, content: bytes) -> None:
    directory.write(record("P-1"))
    (directory.path / "P-0.json").write_bytes(content)
    (directory.path / "notes.txt").write_bytes(content)
    (directory.path / "folder.json").mkdir()
    (directory.path / "link.json").symlink_to(directory.path / "P-1.json")
    assert set(directory.view()) == {"P-1"}
    assert directory.claim("P-0") > 0
    directory.sweep()


def test_a_record_under_another_name_is_ignored(directory: WorkerFiles) -> None:
    directory.write(record("P-1"))
    (directory.path / "P-1.json").rename(directory.path / "P-2.json")
    assert directory.view() == {}


def test_the_file_of_a_worker_long_dead_is_swept_but_its_epoch_is_not_forgotten(
    directory: WorkerFiles, clock: Clock
) -> None:
    epoch = directory.claim("P-0")
    directory.write(record(epoch=epoch))
    clock.now += LEASE_SECONDS + SWEEP_SECONDS - 1
    directory.sweep()
    assert directory.file("P-0").exists()
    clock.now += 2
    directory.write(record("P-1"))
    directory.sweep()
    assert not directory.file("P-0").exists()
    assert set(directory.view()) == {"P-1"}
    clock.now = 1.0
    assert directory.claim("P-0") == epoch + 1


def test_nothing_expires_while_no_lease_could_be_renewed(
    directory: WorkerFiles, clock: Clock
) -> None:
    directory.write(record())
    away = directory.path.rename(directory.path.parent / "away")
    clock.now += 1000
    directory.view()
    away.rename(directory.path)
    directory.sweep()
    assert directory.file("P-0").exists()


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[SmallDisk | PlayedDisk]:
    with small_disk(tmp_path / "disk") as disk:
        yield disk


@pytest.fixture(params=["ENOSPC", "EIO", "EROFS", "EDQUOT"])
def broken(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[PlayedDisk]:
    with pytest.MonkeyPatch.context() as patch:
        yield PlayedDisk(tmp_path / "run", patch, getattr(errno, request.param))


async def outlive(door: Directory, disk: SmallDisk | PlayedDisk, clock: Clock) -> None:
    """A worker and a reader while nothing can be written for three leases, and after."""
    lease = await door.register(record(epoch=await door.claim("P-0")))
    reader = WorkerFiles(door.files.path, clock=clock)
    assert reader.view() == {"P-0": lease.record}
    disk.fill()
    for _ in range(8):
        clock.now += LEASE_SECONDS * 0.4
        await until(lambda: lease._tried == clock.now)
        assert reader.view() == {"P-0": lease.record}
        reader.sweep()
    assert reader.away
    assert not lease.fenced.is_set()
    disk.free()
    clock.now += 0.1
    assert reader.view() == {"P-0": lease.record}  # though the file says that it is over
    assert not reader.away
    await renewed(door.files, clock)
    clock.now += LEASE_SECONDS - 0.1
    assert reader.view() == {"P-0": lease.record}
    await lease.close()
    assert reader.view() == {}
    assert not list(door.files.path.glob("*.tmp"))


async def test_f25_a_full_disk_ends_no_lease_and_leaves_the_last_view(
    disk: SmallDisk | PlayedDisk, clock: Clock
) -> None:
    """Proved without ``_look_for_room``: the reader's view is empty after a lease."""
    await outlive(Directory(disk.path, clock=clock), disk, clock)


async def test_f25_so_does_every_disk_that_cannot_be_written(
    broken: PlayedDisk, clock: Clock
) -> None:
    await outlive(Directory(broken.path, clock=clock), broken, clock)


async def test_f25_a_disk_that_hangs_fences_no_worker(
    door: Directory, directory: WorkerFiles, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Waiting counts as an attempt. Proved without the timeout in ``_Place.put``: it is fenced;
    and without the one in ``leave``: to close the lease takes for ever."""
    monkeypatch.setattr("triptych.runtime.directory.WRITE_TIMEOUT", 0.01)
    lease = await door.register(record())
    going_on, hangs = threading.Event(), threading.Event()

    def hang(*_: object) -> None:
        hangs.set()
        going_on.wait(20)

    with monkeypatch.context() as patch:
        patch.setattr(WorkerFiles, "write", hang)
        await until(hangs.is_set)
        for _ in range(4):
            clock.now += LEASE_SECONDS * 0.6
            await until(lambda: lease._tried == clock.now)
        async with asyncio.timeout(20):
            await lease.close()
        assert not lease.fenced.is_set()
        going_on.set()


async def test_f25_a_worker_that_was_stopped_is_fenced_on_a_full_disk_too(
    disk: SmallDisk | PlayedDisk, clock: Clock
) -> None:
    door = Directory(disk.path, clock=clock)
    lease = await door.register(record(epoch=await door.claim("P-0")))
    disk.fill()
    clock.now += LEASE_SECONDS + 1
    await lease.update(state="ready")
    assert lease.fenced.is_set()
    await lease.close()


async def test_f25_a_reader_that_starts_while_the_disk_is_full_finds_live_workers(
    disk: SmallDisk | PlayedDisk, clock: Clock
) -> None:
    """As a frontend that is started again. Proved without ``lives`` in ``_overdue``."""
    files = Directory(disk.path, clock=clock).files
    mine = msgspec.structs.replace(record(), host=host_id(), pid=os.getpid())
    files.write(msgspec.structs.replace(mine, begun=process_start(os.getpid())))
    files.write(msgspec.structs.replace(mine, id="P-1", begun=1))  # of a process that is no more
    disk.fill()
    clock.now += 2 * LEASE_SECONDS
    reader = WorkerFiles(disk.path, clock=clock)
    assert set(reader.view()) == {"P-0"}
    disk.free()
    clock.now += LEASE_SECONDS + 1
    assert reader.view() == {}


async def test_f25_a_worker_and_a_server_that_start_on_a_full_disk_are_refused(
    disk: SmallDisk | PlayedDisk,
) -> None:
    """Proved without ``check_room`` in ``claim`` and in ``run_dir.hold``."""
    disk.fill()
    with pytest.raises(StartError, match=r"P-0 cannot register.*No space left.*--run-dir"):
        await Directory(disk.path).claim("P-0")
    with (
        pytest.raises(InvalidConfig, match=r"cannot be used: No space left.*--run-dir"),
        run_dir.use(str(disk.path)),
    ):
        pass


def test_an_unreadable_file_does_not_mean_that_the_worker_left(
    directory: WorkerFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As without descriptors. Proved with ``load`` in ``_scan``."""
    directory.write(record())
    view = directory.view()
    directory.write(record())
    with monkeypatch.context() as patch:
        broken = lambda _: os.open("/dev/null/x", os.O_RDONLY)  # noqa: E731
        patch.setattr("triptych.runtime.directory._contents", broken)
        assert directory.view() == view
        assert directory.away
    assert directory.view() == view
    assert not directory.away


async def test_a_worker_late_by_more_than_its_lease_is_fenced(
    door: Directory, directory: WorkerFiles, clock: Clock
) -> None:
    lease = await door.register(record())
    clock.now += LEASE_SECONDS - 1
    await lease.update(state="ready")
    assert not lease.fenced.is_set()
    clock.now += LEASE_SECONDS + 1
    await lease.update(state="ready")
    assert lease.fenced.is_set()
    assert directory.view() == {}
    await lease.close()


def test_the_clock_is_not_the_one_that_people_move() -> None:
    assert abs(boot_time() - float(Path("/proc/uptime").read_text().split()[0])) < 60


def test_a_lease_that_is_not_renewed_ends(tmp_path: Path, clock: Clock) -> None:
    path = tmp_path / "workers"
    directory = WorkerFiles(path, clock=clock)
    directory.claim("P-0")
    directory.write(record())
    assert set(directory.view()) == {"P-0"}
    clock.now += LEASE_SECONDS + 1
    assert directory.view() == {}


async def test_a_renewed_lease_does_not_end(tmp_path: Path, clock: Clock) -> None:
    path = tmp_path / "workers"
    door = Directory(path, clock=clock)
    lease = await door.register(record(epoch=door.files.claim("P-0")))
    reader = WorkerFiles(path, clock=clock)
    for _ in range(4):
        clock.now += LEASE_SECONDS * 0.6
        await renewed(door.files, clock)
        assert reader.view() == {"P-0": lease.record}
    assert not lease.fenced.is_set()
    await lease.close()


async def test_while_discovery_is_away_the_last_view_and_the_leases_stay(
    tmp_path: Path, clock: Clock
) -> None:
    path = tmp_path / "workers"
    door = Directory(path, clock=clock)
    lease = await door.register(record(epoch=door.files.claim("P-0")))
    reader = WorkerFiles(path, clock=clock)
    assert reader.view() == {"P-0": lease.record}
    os.rename(path, path.parent / "away")
    for _ in range(15):
        clock.now += LEASE_SECONDS * 0.8  # a minute in all
        await until(lambda: lease._tried == clock.now)
        assert reader.view() == {"P-0": lease.record}
    os.rename(path.parent / "away", path)
    assert reader.view() == {"P-0": lease.record}  # though the file says that it is over
    await renewed(door.files, clock)
    assert reader.view() == {"P-0": lease.record}
    assert not lease.fenced.is_set()
    await lease.close()
    assert reader.view() == {}


def test_a_worker_that_died_while_discovery_was_away_is_dropped_after_its_return(
    tmp_path: Path, clock: Clock
) -> None:
    path = tmp_path / "workers"
    directory = WorkerFiles(path, clock=clock)
    directory.claim("P-0")
    directory.write(record())
    assert set(directory.view()) == {"P-0"}
    os.rename(path, path.parent / "away")
    clock.now += LEASE_SECONDS * 2
    assert set(directory.view()) == {"P-0"}
    os.rename(path.parent / "away", path)
    assert set(directory.view()) == {"P-0"}
    clock.now += LEASE_SECONDS + 1
    assert directory.view() == {}


def test_epochs_grow_even_when_the_directory_was_lost(directory: WorkerFiles, clock: Clock) -> None:
    before = directory.claim("P-0")
    shutil.rmtree(directory.path)
    clock.now += 0.01
    assert directory.claim("P-0") > before


def test_to_look_makes_nothing(tmp_path: Path) -> None:
    assert WorkerFiles(tmp_path / "workers").view() == {}
    assert not (tmp_path / "workers").exists()


@pytest.mark.timeout(20)
def test_f24_other_than_regular_files_are_neither_waited_for_nor_read(tmp_path):
    """A process that can write to the run directory can put a FIFO or a link there. Proved with
    ``path.read_bytes()``: the sweep waits for a writer for good."""
    files = WorkerFiles(tmp_path)
    files.write(record())
    os.mkfifo(tmp_path / "D-7.json")
    (tmp_path / "D-8.json").symlink_to("/dev/zero")
    with open(tmp_path / "D-9.json", "wb") as large:
        large.truncate(1 << 30)
    files.sweep()
    assert [files.newest(worker) for worker in ("D-7", "D-8", "D-9")] == [0, 0, 0]
    assert set(files.view()) == {"P-0"}


def test_a_file_whose_name_is_not_text_is_ignored(directory: WorkerFiles) -> None:
    """Proved with a strict ``encode`` in ``EntrySigner``: every view raises UnicodeEncodeError."""
    directory.write(record())
    signed = directory.file("P-0").read_bytes()
    (directory.path / os.fsdecode(b"P-\xff.json")).write_bytes(signed)
    assert set(directory.view()) == {"P-0"}
    assert directory.rejected == {}
    directory.sweep()
