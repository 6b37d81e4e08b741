"""The directory seen from its files, on a clock of the test's."""

from __future__ import annotations

import stat
from pathlib import Path

import msgspec
import pytest

from triptych.messages import WorkerRecord
from triptych.runtime.discovery import LEASE_SECONDS, SWEEP_SECONDS, Directory, boottime


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def directory(tmp_path: Path, clock: Clock) -> Directory:
    directory = Directory(tmp_path / "workers", clock=clock)
    directory.claim("P-0")
    return directory


def record(worker: str = "P-0", epoch: int = 2_000_000) -> WorkerRecord:
    return WorkerRecord(worker, "P", epoch, "127.0.0.1:9", 42, "model")


def test_only_the_owner_may_look(directory: Directory) -> None:
    directory.write(record())
    assert stat.S_IMODE(directory.path.stat().st_mode) == 0o700
    for file in directory.path.iterdir():
        assert stat.S_IMODE(file.stat().st_mode) == 0o600


def test_nothing_is_left_over_but_the_newest_claim(directory: Directory) -> None:
    for _ in range(5):
        epoch = directory.claim("P-0")
        directory.write(record(epoch=epoch))
    names = {file.name for file in directory.path.iterdir()}
    assert names == {"P-0.json", f"P-0.{epoch}.claim"}


def test_claims_of_one_worker_are_not_those_of_another(directory: Directory) -> None:
    for worker in ("P-0", "P-0.1", "P-0.1.claim", "P"):
        first = directory.claim(worker)
        assert directory.newest(worker) == first
        assert directory.claim(worker) == first + 1
    assert directory.newest("P-1") == 0


def test_a_lease_lives_as_long_as_it_says(directory: Directory, clock: Clock) -> None:
    directory.write(record())
    clock.now += LEASE_SECONDS - 0.1
    assert set(directory.view()) == {"P-0"}
    clock.now += 0.2
    assert directory.view() == {}


def test_a_lease_from_before_the_host_started_anew_is_dead(
    directory: Directory, clock: Clock
) -> None:
    directory.write(record())
    clock.now = 3.0
    assert directory.view() == {}


def test_a_changed_file_is_read_again_and_an_unchanged_one_is_not(
    directory: Directory, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory.write(record())
    assert directory.view()["P-0"].state == "ready"
    with monkeypatch.context() as patch:
        patch.setattr("triptych.runtime.discovery._load", lambda path: 1 / 0)
        assert set(directory.view()) == {"P-0"}
    directory.write(msgspec.structs.replace(record(), state="draining"))
    assert directory.view()["P-0"].state == "draining"


def test_a_view_never_goes_back_to_an_older_epoch(directory: Directory) -> None:
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
def test_files_that_are_not_ours_are_ignored(directory: Directory, content: bytes) -> None:
    directory.write(record("P-1"))
    (directory.path / "P-0.json").write_bytes(content)
    (directory.path / "notes.txt").write_bytes(content)
    (directory.path / "folder.json").mkdir()
    (directory.path / "link.json").symlink_to(directory.path / "P-1.json")
    assert set(directory.view()) == {"P-1"}
    assert directory.claim("P-0") > 0
    directory.sweep()


def test_a_record_under_another_name_is_ignored(directory: Directory) -> None:
    directory.write(record("P-1"))
    (directory.path / "P-1.json").rename(directory.path / "P-2.json")
    assert directory.view() == {}


def test_the_file_of_a_worker_long_dead_is_swept_but_its_epoch_is_not_forgotten(
    directory: Directory, clock: Clock
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


def test_nothing_is_swept_while_nobody_could_renew(directory: Directory, clock: Clock) -> None:
    directory.write(record())
    away = directory.path.rename(directory.path.parent / "away")
    clock.now += 1000
    directory.view()
    away.rename(directory.path)
    directory.sweep()
    assert directory.file("P-0").exists()


async def test_a_full_disk_costs_no_lease_and_leaves_the_last_record(
    directory: Directory, monkeypatch: pytest.MonkeyPatch
) -> None:
    lease = await directory.register(record())

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Directory, "write", full)
    await lease.update(state="draining")
    assert not lease.fenced.is_set()
    assert directory.view()["P-0"].state == "ready"
    await lease.close()


async def test_a_worker_late_by_more_than_its_lease_is_fenced(
    directory: Directory, clock: Clock
) -> None:
    lease = await directory.register(record())
    clock.now += LEASE_SECONDS - 1
    await lease.update(state="ready")
    assert not lease.fenced.is_set()
    clock.now += LEASE_SECONDS + 1
    await lease.update(state="ready")
    assert lease.fenced.is_set()
    assert directory.view() == {}
    await lease.close()


def test_the_clock_is_not_the_one_that_people_move() -> None:
    assert abs(boottime() - float(Path("/proc/uptime").read_text().split()[0])) < 60
