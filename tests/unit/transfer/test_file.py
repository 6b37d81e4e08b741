"""Files between hosts: what other processes may find or do in the folder.

What every transport must do is in tests/contract/test_transfer.py.
"""
# ruff: noqa: ASYNC240 (the folder is local, and nothing else runs)

from __future__ import annotations

import asyncio
import os
import stat
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import msgspec
import pytest

from triptych.errors import InvalidConfig, ServiceError, TicketLost
from triptych.messages import Ticket
from triptych.transfer import file as file_module
from triptych.transfer.base import DTYPE_BYTES, Array, TransportError
from triptych.transfer.client import TransferClient
from triptych.transfer.file import FOLDER_ID_FILE, FileAddress, FileTransport
from triptych.transfer.registry import TransferEndpoint, common_transport

DATA = bytes(range(256)) * 8


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "shared"


@pytest.fixture
async def owner(folder: Path) -> AsyncIterator[FileTransport]:
    transport = FileTransport(folder, "worker-1", 1)
    yield transport
    await transport.close()


@pytest.fixture
async def reader(folder: Path) -> AsyncIterator[FileTransport]:
    transport = FileTransport(folder, "worker-2", 1)
    yield transport
    await transport.close()


def array(data: bytes = DATA, dtype: str = "float32") -> Array:
    return Array(memoryview(data), dtype, (len(data) // DTYPE_BYTES[dtype],))


def files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.iterdir() if path.name != FOLDER_ID_FILE)


def path_of(ticket: Ticket, folder: Path) -> Path:
    name = msgspec.msgpack.decode(ticket.address, type=FileAddress).name
    return folder / f"{name.hex()}.safetensors"


async def until(true: Callable[[], bool]) -> None:
    async with asyncio.timeout(30):
        while not true():
            await asyncio.sleep(0.01)


async def test_only_the_user_can_open_folder_and_files(owner: FileTransport, folder: Path) -> None:
    path = path_of(await owner.publish([array()]), folder)
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


async def test_a_folder_that_others_can_read_is_refused(folder: Path) -> None:
    folder.mkdir(mode=0o755)
    folder.chmod(0o755)
    transfers = TransferClient("file", "worker-1", 1, transfer_folder=str(folder))
    with pytest.raises(InvalidConfig, match=r"mode 0755.*chmod 700"):
        await transfers.check_transports()
    with pytest.raises(ServiceError, match="mode 0755"):
        await transfers.publish([array()])
    await transfers.close()


@pytest.mark.parametrize("kind", ["file", "missing"])
async def test_a_path_that_is_not_a_folder_is_refused(tmp_path: Path, kind: str) -> None:
    there = tmp_path / "there"
    there.write_bytes(b"")
    path = there if kind == "file" else tmp_path / "no" / "such"
    transport = FileTransport(path, "worker-1", 1)
    with pytest.raises((InvalidConfig, TransportError), match="--transfer-folder"):
        await transport.open()
    await transport.close()


def test_without_its_folder_the_error_names_the_missing_setting() -> None:
    with pytest.raises(InvalidConfig, match="--transfer-folder"):
        TransferClient("file", "worker-1", 1)


async def test_a_process_without_a_folder_reads_no_files(owner: FileTransport) -> None:
    ticket = await owner.publish([array()])
    other = TransferClient("auto", "worker-2", 1)
    with pytest.raises(TicketLost, match="unknown here"):
        await other.fetch(ticket)
    await other.close()


async def test_other_programs_can_read_the_files(owner: FileTransport, folder: Path) -> None:
    """They are safetensors files, bit for bit."""
    safetensors = pytest.importorskip("safetensors")
    arrays = [array(os.urandom(16 * 6), dtype) for dtype in DTYPE_BYTES]
    path = path_of(await owner.publish([*arrays, array(b"", "bfloat16")]), folder)
    found = dict(safetensors.deserialize(path.read_bytes()))
    assert len(found) == len(DTYPE_BYTES) + 1
    for index, one in enumerate(arrays):
        assert bytes(found[str(index)]["data"]) == bytes(one.buffer)
    assert found[str([*DTYPE_BYTES].index("bfloat16"))]["dtype"] == "BF16"
    assert found[str([*DTYPE_BYTES].index("complex128"))]["shape"] == [6, 2]


def truncated(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


def longer(path: Path) -> None:
    path.write_bytes(path.read_bytes() + b"more")


def empty(path: Path) -> None:
    path.write_bytes(b"")


def other_bytes(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def other_header(path: Path) -> None:
    data = path.read_bytes()
    path.write_bytes(data.replace(b"F32", b"I32"))


def huge_header(path: Path) -> None:
    data = path.read_bytes()
    path.write_bytes(b"\xff" * 8 + data[8:])


def pickled(path: Path) -> None:
    size = path.stat().st_size
    path.write_bytes(b"cos\nsystem\n(S'true'\ntR.".ljust(size, b"."))


def sparse(path: Path) -> None:
    os.truncate(path, 1 << 40)


def link(path: Path) -> None:
    other = path.with_name("other")
    path.rename(other)
    path.symlink_to(other)


def pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path, 0o600)


def directory(path: Path) -> None:
    path.unlink()
    path.mkdir()


def unreadable(path: Path) -> None:
    if os.geteuid() == 0:
        pytest.skip("root reads everything")
    path.chmod(0)


@pytest.mark.parametrize(
    "spoil",
    [
        truncated,
        longer,
        empty,
        other_bytes,
        other_header,
        huge_header,
        pickled,
        sparse,
        link,
        pipe,
        directory,
        unreadable,
    ],
)
async def test_a_file_unlike_its_ticket_is_lost(
    owner: FileTransport, reader: FileTransport, folder: Path, spoil: Callable[[Path], None]
) -> None:
    ticket = await owner.publish([array()])
    await reader.fetch(ticket)
    path = path_of(ticket, folder)
    expires = path.stat().st_mtime
    spoil(path)
    os.utime(path, (expires, expires), follow_symlinks=spoil is not link)
    with pytest.raises(TicketLost):
        await reader.fetch(ticket)


async def test_a_ticket_that_promises_more_than_memory_holds_is_lost(
    owner: FileTransport, reader: FileTransport
) -> None:
    ticket = await owner.publish([array()])
    part = msgspec.structs.replace(ticket.parts[0], shape=(1 << 60,))
    lie = msgspec.structs.replace(ticket, parts=(part,), size=1 << 62)
    with pytest.raises(TicketLost):
        await reader.fetch(lie)


async def test_a_reader_of_another_host_sees_expiry_by_the_files_time(
    owner: FileTransport, reader: FileTransport, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has another boot clock, and cannot ask whether the owner lives. Off: ``_read`` does not
    look at the time."""
    ticket = await owner.publish([array()], lifetime=60)
    short = await owner.publish([array()], lifetime=0.3)
    for timer in [timer for _, timer in owner._tickets.values()]:
        timer.cancel()  # as if the owner stood still
    monkeypatch.setattr(file_module, "memory_domain", lambda: "elsewhere")
    assert bytes((await reader.fetch(short)).arrays[0].buffer) == DATA
    await asyncio.sleep(0.4)
    with pytest.raises(TicketLost, match="expired"):
        await reader.fetch(short)
    assert bytes((await reader.fetch(ticket)).arrays[0].buffer) == DATA


async def leave(folder: Path, name: str, age: float) -> Path:
    path = folder / name
    path.write_bytes(b"left")
    then = time.time() - age
    os.utime(path, (then, then))
    return path


async def test_what_dead_writers_left_is_removed(
    owner: FileTransport, reader: FileTransport, folder: Path
) -> None:
    ticket = await owner.publish([array()])
    kept = [
        await leave(folder, "0" * 32 + ".safetensors", 30),  # its owner may be removing it
        await leave(folder, "1" * 32 + ".tmp", 300),  # it may be being written
        await leave(folder, "notes.txt", 1e6),  # somebody else's
        await leave(folder, "model.safetensors", 1e6),
    ]
    old = [
        await leave(folder, "2" * 32 + ".safetensors", 90),
        await leave(folder, "3" * 32 + ".tmp", 900),
    ]
    await reader.open()
    await until(lambda: not any(path.exists() for path in old))
    assert all(path.exists() for path in kept)
    await reader.fetch(ticket)


async def test_sweeps_go_on(
    reader: FileTransport, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(file_module, "FILE_SWEEP_SECONDS", 0.05)
    await reader.open()
    for number in range(3):
        path = await leave(folder, f"{number:032}.safetensors", 90)
        await until(lambda path=path: not path.exists())  # type: ignore[misc]


async def test_nothing_is_left_when_it_closes(owner: FileTransport, folder: Path) -> None:
    tickets = [await owner.publish([array()]) for _ in range(3)]
    owner.release(tickets[0])
    await owner.close()
    assert files(folder) == []
    with pytest.raises(TicketLost):
        await owner.publish([array()])
    with pytest.raises(TicketLost):
        await owner.fetch(tickets[1])


async def test_a_cancelled_publish_leaves_no_file(
    owner: FileTransport, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also when it is cancelled while a thread writes. Off: ``publish`` removes nothing."""
    await owner.open()
    begun, real = asyncio.Event(), owner._write
    loop = asyncio.get_running_loop()

    def slow(*args: object) -> int:
        loop.call_soon_threadsafe(begun.set)
        time.sleep(0.1)
        return real(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(owner, "_write", slow)
    task = asyncio.create_task(owner.publish([array()]))
    await begun.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert owner.segments == 1
    await until(lambda: not owner.segments)
    await until(lambda: not files(folder))


async def test_a_full_disk_fails_the_one_request(
    owner: FileTransport, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    await owner.open()

    def full(*args: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(file_module, "_write_all", full)
        with pytest.raises(ServiceError, match="No space left"):
            await owner.publish([array()])
    assert owner.segments == owner.tickets == 0
    await until(lambda: not files(folder))
    await owner.publish([array()])


async def test_a_folder_that_vanishes_is_a_lost_ticket(
    owner: FileTransport, reader: FileTransport, folder: Path
) -> None:
    ticket: Ticket = await owner.publish([array()])
    await reader.fetch(ticket)
    folder.rename(folder.with_name("moved"))
    with pytest.raises(TicketLost):
        await reader.fetch(ticket)
    with pytest.raises(ServiceError):
        await owner.publish([array()])


async def test_files_do_not_hold_up_the_event_loop(
    owner: FileTransport, reader: FileTransport, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file server that takes its time. Off: any of these on the event loop."""
    await owner.open()

    def slowly(name: str) -> None:
        real = getattr(os, name)

        def slow(*args: object, **options: object) -> object:
            if "shared" in str(args[0]):
                time.sleep(0.5)
            return real(*args, **options)

        monkeypatch.setattr(os, name, slow)

    for name in ("open", "unlink", "rename", "utime"):
        slowly(name)
    latest, longest = time.monotonic(), 0.0

    async def tick() -> None:
        nonlocal latest, longest
        while True:
            await asyncio.sleep(0.01)
            longest, latest = max(longest, time.monotonic() - latest), time.monotonic()

    ticking = asyncio.create_task(tick())
    ticket = await owner.publish([array()])
    await reader.fetch(ticket)
    owner.release(ticket)
    await until(lambda: not owner.segments)
    ticking.cancel()
    assert longest < 0.45


async def test_a_folder_of_another_user_is_refused(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Off: ``_open_folder`` compares no owner."""
    folder.mkdir(mode=0o700)
    monkeypatch.setattr(os, "geteuid", lambda: folder.stat().st_uid + 1)
    transport = FileTransport(folder, "worker-1", 1)
    with pytest.raises(InvalidConfig, match="belongs to user"):
        await transport.open()
    await transport.close()


async def test_processes_with_one_folder_find_one_id(
    owner: FileTransport, reader: FileTransport, folder: Path
) -> None:
    await asyncio.gather(owner.open(), reader.open())
    assert owner.folder_id == reader.folder_id == (folder / FOLDER_ID_FILE).read_text()
    assert stat.S_IMODE((folder / FOLDER_ID_FILE).stat().st_mode) == 0o600


async def test_the_id_of_another_process_is_awaited(owner: FileTransport, folder: Path) -> None:
    folder.mkdir(mode=0o700)
    (folder / FOLDER_ID_FILE).touch()  # as between its creation and its content
    opening = asyncio.create_task(owner.open())
    await asyncio.sleep(0.1)
    assert not opening.done()
    (folder / FOLDER_ID_FILE).write_text("ab" * 16)
    await opening
    assert owner.folder_id == "ab" * 16


async def test_a_folder_without_an_id_is_refused(
    owner: FileTransport, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(file_module, "FOLDER_ID_SECONDS", 0.05)
    folder.mkdir(mode=0o700)
    (folder / FOLDER_ID_FILE).write_text("nonsense")
    with pytest.raises(InvalidConfig, match="Remove that file"):
        await owner.open()


async def test_hosts_with_different_folders_do_not_use_them(tmp_path: Path) -> None:
    """The shared folder is not mounted on one of them. Off: ``file`` reaches all that have opened a
    folder, and each request ends with ticket_lost."""

    def endpoint(host: str, client: TransferClient) -> TransferEndpoint:
        return TransferEndpoint(host, "", ("file", "inline"), client.folder)

    shared, local = str(tmp_path / "shared"), str(tmp_path / "local")
    clients = [
        TransferClient("auto", f"worker-{number}", 1, transfer_folder=folder)
        for number, folder in enumerate([shared, shared, local])
    ]
    one, same, other = clients
    assert common_transport([endpoint("a", one), endpoint("b", same)]) == "inline"  # not open yet
    for client in clients:
        await client.check_transports(other_hosts=True)
    assert common_transport([endpoint("a", one), endpoint("b", same)]) == "file"
    assert common_transport([endpoint("a", one), endpoint("b", other)]) == "inline"
    ticket = await one.publish([array()], by="file")
    with pytest.raises(TicketLost, match="another folder"):
        await other.fetch(ticket)
    for client in clients:
        await client.close()


async def test_a_publish_that_close_overtakes_leaves_no_file(
    owner: FileTransport, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Off: ``publish`` makes a ticket after ``close`` has removed all tickets."""
    await owner.open()
    begun, go_on, real = threading.Event(), threading.Event(), owner._write

    def slow(*args: object) -> int:
        begun.set()
        assert go_on.wait(30)
        return real(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(owner, "_write", slow)
    publishing = asyncio.create_task(owner.publish([array()]))
    await asyncio.to_thread(begun.wait)
    closing = asyncio.create_task(owner.close())
    await asyncio.sleep(0.05)
    go_on.set()
    with pytest.raises(TicketLost, match="ending"):
        await publishing
    await closing
    assert owner.tickets == owner.segments == 0
    assert files(folder) == []


async def test_any_error_of_a_write_leaves_no_file(
    owner: FileTransport, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Off: ``publish`` cleans up after OSError only."""
    await owner.open()

    def broken(*args: object) -> None:
        raise MemoryError

    monkeypatch.setattr(file_module, "_write_all", broken)
    with pytest.raises(MemoryError):
        await owner.publish([array()])
    assert owner.segments == owner.tickets == 0
    await until(lambda: not files(folder))


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """A file server that answers while the event is set."""
    answers = threading.Event()
    answers.set()
    real = os.open

    def slow(path: object, *args: int, **options: object) -> int:
        if "shared" in str(path):
            answers.wait(30)
        return real(path, *args, **options)  # type: ignore[call-overload, no-any-return]

    monkeypatch.setattr(os, "open", slow)
    yield answers
    answers.set()


async def test_a_file_server_that_hangs_fails_requests(
    owner: FileTransport,
    reader: FileTransport,
    folder: Path,
    server: threading.Event,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Off: no deadline, and requests hang."""
    ticket = await owner.publish([array()])
    await reader.open()
    monkeypatch.setattr(file_module, "FILE_SECONDS", 0.1)
    server.clear()
    third = FileTransport(folder, "worker-3", 1)
    async with asyncio.timeout(10):
        with pytest.raises(TicketLost, match="hangs"):
            await reader.fetch(ticket)
        for _ in range(file_module.THREADS + 2):  # more than have a thread
            with pytest.raises(ServiceError, match="hangs"):
                await owner.publish([array()])
        with pytest.raises(TransportError, match="hangs"):
            await third.open()
    server.set()
    await until(lambda: owner.segments == 1)  # the late ones are removed
    await third.close()


async def test_one_sweep_at_a_time(
    owner: FileTransport, server: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Off: each minute another one takes a thread, while the first hangs."""
    begun = 0
    real = owner._sweep

    def sweep() -> None:
        nonlocal begun
        begun += 1
        real()

    monkeypatch.setattr(file_module, "FILE_SWEEP_SECONDS", 0.01)
    monkeypatch.setattr(owner, "_sweep", sweep)
    await owner._in_thread(0, owner._open_folder)
    server.clear()
    owner._sweep_soon(0)
    await asyncio.sleep(0.2)
    assert begun == 1
    server.set()
    await until(lambda: begun > 1)


async def test_close_ends_what_waits_for_a_thread(
    owner: FileTransport, server: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Off: what waits runs after ``close``, without ``cancel_futures``."""
    await owner.open()
    monkeypatch.setattr(file_module, "CLOSE_SECONDS", 0.1)
    monkeypatch.setattr(file_module, "FILE_SECONDS", 5)
    written = []
    real = owner._write

    def write(name: str, *args: object) -> int:
        written.append(name)
        return real(name, *args)  # type: ignore[arg-type]

    monkeypatch.setattr(owner, "_write", write)
    server.clear()
    count = file_module.THREADS + 2
    publishing = [asyncio.create_task(owner.publish([array()])) for _ in range(count)]
    await until(lambda: len(written) >= file_module.THREADS)
    await owner.close()
    server.set()
    ends = await asyncio.gather(*publishing, return_exceptions=True)
    assert {type(end) for end in ends} == {TicketLost}
    assert len(written) == file_module.THREADS
