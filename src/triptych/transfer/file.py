"""Files in a folder that all hosts share: the simplest way between hosts without NIXL.

``publish`` writes a safetensors file under a temporary name and renames it, so readers see whole
files only. ``fetch`` copies the file into memory of its own and compares its size, header and
checksum with the ticket: the ticket determines every byte of the header, so nothing parses it.
``release`` removes the file, soon.

A file's modification time is the time at which its ticket expires, by the file system's clock. So
every process with the folder can remove the files of a writer that died, and does so once a
minute. Names cannot be guessed, and only the user who runs the workers can open folder and files.

A file in the folder has the folder's random id. Processes advertise it, and only those with the
same id read each other's tickets: on a host without the mount the path is another, local folder.

All file I/O runs in threads of this module's own, with deadlines: a file server that hangs holds up
neither the event loop nor other work in threads, and fails the requests that need it. Files are
read, not mapped: a truncated one is an error and not a SIGBUS.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import itertools
import logging
import os
import re
import stat
import time
import zlib
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from io import FileIO
from pathlib import Path
from typing import Any, TypeVar

import msgspec
from msgspec import Struct

from triptych.errors import InvalidConfig, ServiceError, TicketLost
from triptych.host import boot_time, process_start
from triptych.messages import TensorSpec, Ticket
from triptych.transfer.base import (
    Array,
    CopiedArrays,
    TransportError,
    aligned_offsets,
    byte_count,
    checked_sizes,
    decode_address,
    no_memory_to_receive,
    part_sizes,
    slice_parts,
    ticket_parts,
)
from triptych.transfer.registry import TransportContext
from triptych.transfer.segment import memory_domain

log = logging.getLogger(__name__)
T = TypeVar("T")

FILE_SWEEP_SECONDS = 60.0
EXPIRED_FILE_SECONDS = 60.0  # after its expiry another process removes a file: its writer is dead
UNFINISHED_FILE_SECONDS = 600.0  # after its last byte another process removes a temporary file
CLOSE_SECONDS = 10.0  # for removing files at the end
FILE_SECONDS = 30.0  # after which a file server hangs, and besides for each byte:
SLOWEST_BYTES_PER_SECOND = 10 << 20
FOLDER_ID_SECONDS = 5.0  # for another process to write the folder's id
FOLDER_ID_FILE = "triptych-folder-id"
FOLDER_ID_BYTES = 32  # 16 random ones in hexadecimal
THREADS = 8
_OURS = re.compile(r"[0-9a-f]{32}\.(safetensors|tmp)")
_FOLDER_ID = re.compile(rb"[0-9a-f]{%d}" % FOLDER_ID_BYTES)
_CREATE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK  # not to wait on a pipe
_ENDING = "this process is ending"
_GONE = "the file of the tensors is gone: its owner has released it, or it has expired"
_WRONG = "the file of the tensors does not match its ticket"

_DTYPES = {
    "bool": "BOOL",
    "uint8": "U8",
    "int8": "I8",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "uint16": "U16",
    "int16": "I16",
    "float16": "F16",
    "bfloat16": "BF16",
    "uint32": "U32",
    "int32": "I32",
    "float32": "F32",
    "uint64": "U64",
    "int64": "I64",
    "float64": "F64",
    "complex64": "C64",
    "complex128": "F64",  # with one more axis of two: safetensors has no such dtype
}


class FileAddress(Struct, frozen=True, array_like=True):
    name: bytes  # 16 random ones; the file's name in hexadecimal
    host: str  # the owner's memory domain
    pid: int
    started: int  # when the owner's process started, in the kernel's ticks since boot
    folder: str  # its id


def open_transport(context: TransportContext) -> FileTransport:
    folder = Path(context.settings["transfer_folder"])
    return FileTransport(folder, context.owner, context.epoch)


class FileTransport:
    name = "file"

    def __init__(self, folder: Path, owner: str, epoch: int) -> None:
        self._folder = folder
        self._owner = owner
        self._epoch = epoch
        self.folder_id = ""  # the same in all processes with this folder; empty: not open
        self._serials = itertools.count(1)
        self._tickets: dict[int, tuple[str, asyncio.TimerHandle]] = {}  # name, expiry
        self._files: set[str] = set()  # written or being written, and not yet removed
        self._pending: set[asyncio.Future[Any]] = set()  # what ``close`` waits for
        self._clock: float | None = None  # the file system's time less boot time; None: not open
        self._sweep_timer: asyncio.TimerHandle | None = None
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="transfer-file")
        self._closing = False  # ``close`` has begun: nothing new
        self._closed = False  # and has ended: no threads

    @property
    def tickets(self) -> int:
        return len(self._tickets)

    @property
    def segments(self) -> int:
        """Files that are not removed yet."""
        return len(self._files)

    async def open(self) -> None:
        """Check that the folder is there, private and writable, and begin to sweep it."""
        try:
            await self._in_thread(0, self._open_folder)
        except OSError as error:
            raise TransportError(
                f"--transfer-folder {self._folder}: {error.strerror or error}"
            ) from None
        if self._sweep_timer is None:
            self._sweep_soon(0)

    def empty(self, dtype: str, shape: tuple[int, ...]) -> Array:
        return Array(memoryview(bytearray(byte_count(dtype, shape))), dtype, shape)

    async def publish(self, arrays: Sequence[Array], *, lifetime: float = 60.0) -> Ticket:
        sizes = checked_sizes(arrays)
        parts = ticket_parts(arrays, aligned_offsets(sizes)[0])
        await self._ready()
        key = os.urandom(16)
        name = key.hex()
        buffers = [memoryview(_header(parts, sizes)), *(array.buffer for array in arrays)]
        with contextlib.ExitStack() as undo:
            job, done = self._submit(self._write, name, buffers, lifetime)
            self._files.add(name)
            undo.callback(self._abandon, name, done)
            try:
                checksum = await self._result(job, done, sum(sizes))
            except OSError as error:
                raise ServiceError(
                    "the worker could not write its tensors to --transfer-folder: "
                    f"{error.strerror or error}"
                ) from None
            if self._closing:
                raise TicketLost(_ENDING)
            undo.pop_all()
        serial = next(self._serials)
        loop = asyncio.get_running_loop()
        timer = loop.call_later(lifetime, self._close_ticket, serial)
        self._tickets[serial] = name, timer
        pid = os.getpid()
        address = FileAddress(key, memory_domain(), pid, process_start(pid), self.folder_id)
        return Ticket(
            owner=self._owner,
            epoch=self._epoch,
            transport=self.name,
            serial=serial,
            address=msgspec.msgpack.encode(address),
            parts=parts,
            size=sum(sizes),
            checksum=checksum,
            expires=boot_time() + lifetime,
        )

    async def fetch(self, ticket: Ticket) -> CopiedArrays:
        sizes = part_sizes(ticket)
        offsets, total = aligned_offsets(sizes)
        if [part.offset for part in ticket.parts] != offsets:
            raise TicketLost("the ticket is damaged: its parts do not follow each other")
        address = decode_address(ticket.address, FileAddress)
        if address.host == memory_domain():  # else neither clock nor processes are ours
            if not ticket.expires > boot_time():
                raise TicketLost("the ticket has expired")
            started = process_start(address.pid)
            if not started or started != address.started:
                raise TicketLost("the owner of the tensors is gone")
        await self._ready()
        if address.folder != self.folder_id:
            raise TicketLost(
                "the owner of the tensors has another folder: --transfer-folder must be the same "
                "shared folder on all hosts, and one of them may not have mounted it"
            )
        try:
            path = self._path(address.name.hex())
            memory = await self._in_thread(total, self._read, path, ticket, sizes, offsets, total)
        except FileNotFoundError:
            raise TicketLost(_GONE) from None
        except OSError as error:  # a link, no permission, or a file server that failed
            raise TicketLost(
                f"the file of the tensors cannot be read: {error.strerror or error}"
            ) from None
        return CopiedArrays(slice_parts(memory, ticket, sizes), self.name)

    def release(self, ticket: Ticket) -> None:
        if (ticket.owner, ticket.epoch) == (self._owner, self._epoch):
            self._close_ticket(ticket.serial)

    async def close(self) -> None:
        self._closing = True
        for serial in list(self._tickets):
            self._close_ticket(serial)
        if self._sweep_timer is not None:
            self._sweep_timer.cancel()
            self._sweep_timer = None
        with contextlib.suppress(TimeoutError):  # a file server that hangs: others will sweep
            async with asyncio.timeout(CLOSE_SECONDS):
                while self._pending:  # ``publish`` resumes before us, and adds a removal
                    await asyncio.wait(self._pending)
        self._closed = True
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def _ready(self) -> None:
        if self._closing:
            raise TicketLost(_ENDING)
        if self._clock is None:
            try:
                await self.open()
            except (TransportError, InvalidConfig) as error:
                raise ServiceError(str(error)) from None

    def _close_ticket(self, serial: int) -> None:
        if (opened := self._tickets.pop(serial, None)) is not None:
            name, timer = opened
            timer.cancel()
            self._remove(name)

    def _remove(self, name: str) -> None:
        if self._closed:  # others will sweep
            return
        _, removed = self._submit(_unlink, self._path(name))
        removed.add_done_callback(lambda done: self._files.discard(name))

    def _abandon(self, name: str, done: asyncio.Future[Any]) -> None:
        """Remove a file that no ticket will name, once its writer is done."""
        if not done.done():
            done.add_done_callback(lambda done: self._abandon(name, done))
        elif done.cancelled() or done.exception() is not None:  # then it has left no file
            self._files.discard(name)
        else:
            self._remove(name)

    def _submit(self, call: Callable[..., T], *args: Any) -> tuple[Future[T], asyncio.Future[T]]:
        """Run a call in a thread: its job there, and the same for the event loop."""
        if self._closed:
            raise TicketLost(_ENDING)
        job = self._threads.submit(call, *args)
        done = asyncio.wrap_future(job)
        self._pending.add(done)
        done.add_done_callback(self._finished)
        return job, done

    async def _result(self, job: Future[T], done: asyncio.Future[T], size: int) -> T:
        """Wait for a job that moves so many bytes; TimeoutError, an OSError, after its deadline.

        A job that waits for a thread then, or on cancellation, never begins. One that runs goes on.
        """
        try:
            seconds = FILE_SECONDS + size / SLOWEST_BYTES_PER_SECOND
            await asyncio.wait([done], timeout=seconds)
        finally:
            job.cancel()
        if not done.done():
            raise TimeoutError(
                errno.ETIMEDOUT, f"no answer in {seconds:.0f} s: the file server hangs"
            )
        if done.cancelled():  # by ``close``
            raise TicketLost(_ENDING)
        return done.result()

    def _finished(self, future: asyncio.Future[Any]) -> None:
        self._pending.discard(future)
        if not future.cancelled():
            future.exception()  # nobody may be waiting for it any more

    async def _in_thread(self, size: int, call: Callable[..., T], *args: Any) -> T:
        return await self._result(*self._submit(call, *args), size)

    def _sweep_soon(self, seconds: float) -> None:
        if self._closing:
            return
        loop = asyncio.get_running_loop()
        self._sweep_timer = loop.call_later(seconds, self._start_sweep)

    def _start_sweep(self) -> None:
        _, done = self._submit(self._sweep)
        done.add_done_callback(lambda done: self._sweep_soon(FILE_SWEEP_SECONDS))

    # In threads.

    def _path(self, name: str) -> Path:
        return self._folder / f"{name}.safetensors"

    def _open_folder(self) -> None:
        with contextlib.suppress(FileExistsError):
            self._folder.mkdir(mode=0o700)
        about = self._folder.stat()
        mode = about.st_mode
        if not stat.S_ISDIR(mode):
            raise InvalidConfig(f"--transfer-folder {self._folder} is not a folder")
        if about.st_uid != os.geteuid():
            raise InvalidConfig(
                f"--transfer-folder {self._folder} belongs to user {about.st_uid}, and this "
                f"process runs as user {os.geteuid()}: its owner could read tensors. Name a "
                "folder of this user, or one that is not there yet"
            )
        if mode & 0o077:
            raise InvalidConfig(
                f"--transfer-folder {self._folder} is open to other users (mode "
                f"{mode & 0o777:04o}), and who reads it reads tensors. Run chmod 700 on it, or "
                "name a folder in it: Triptych makes one with the right mode"
            )
        self.folder_id = self._read_or_create_id()
        self._measure_clock()

    def _read_or_create_id(self) -> str:
        """The folder's id. The first process that opens the folder writes it."""
        path = self._folder / FOLDER_ID_FILE
        try:
            fd = os.open(path, _CREATE, 0o600)
        except FileExistsError:
            return self._read_id(path)
        with contextlib.ExitStack() as undo:
            undo.callback(_unlink, path)
            with FileIO(fd, "wb") as file:
                _write_all(file, memoryview(os.urandom(FOLDER_ID_BYTES // 2).hex().encode()))
            undo.pop_all()
        return self._read_id(path)

    def _read_id(self, path: Path) -> str:
        deadline = time.monotonic() + FOLDER_ID_SECONDS
        while True:  # another process may be writing it
            with FileIO(os.open(path, _READ), "rb") as file:
                found = file.read(FOLDER_ID_BYTES + 1) or b""
            if _FOLDER_ID.fullmatch(found):
                return found.decode()
            if time.monotonic() > deadline:
                raise InvalidConfig(f"{path} has no id in it. Remove that file")
            time.sleep(0.02)

    def _measure_clock(self) -> None:
        name = os.urandom(16).hex()
        self._write(name, [], 0)
        _unlink(self._path(name))

    def _now(self) -> float:
        """The file system's time."""
        return boot_time() + (self._clock or 0.0)

    def _write(self, name: str, buffers: Sequence[memoryview], lifetime: float) -> int:
        """Write a file that expires; returns the checksum of all buffers but the first."""
        temporary = self._folder / f"{name}.tmp"
        fd = os.open(temporary, _CREATE, 0o600)
        checksum = 0
        with contextlib.ExitStack() as undo:
            undo.callback(_unlink, temporary)
            with FileIO(fd, "wb") as file:
                for index, buffer in enumerate(buffers):
                    _write_all(file, buffer)
                    checksum = zlib.crc32(buffer, checksum) if index else 0
            os.utime(temporary)
            now = temporary.stat().st_mtime
            self._clock = now - boot_time()
            os.utime(temporary, (now, now + lifetime))
            temporary.rename(self._path(name))
            undo.pop_all()
        return checksum

    def _read(
        self, path: Path, ticket: Ticket, sizes: list[int], offsets: list[int], total: int
    ) -> memoryview:
        header = _header(ticket.parts, sizes)
        with FileIO(os.open(path, _READ), "rb") as file:
            about = os.fstat(file.fileno())
            if not stat.S_ISREG(about.st_mode) or about.st_size != len(header) + ticket.size:
                raise TicketLost(_WRONG)
            if about.st_mtime <= self._now():
                raise TicketLost("the ticket has expired")
            found = memoryview(bytearray(len(header)))
            _read_all(file, found)
            if found != header:
                raise TicketLost(_WRONG)
            try:
                memory = memoryview(bytearray(total))
            except MemoryError:
                raise no_memory_to_receive() from None
            checksum = 0
            for offset, size in zip(offsets, sizes, strict=True):
                _read_all(file, memory[offset : offset + size])
                checksum = zlib.crc32(memory[offset : offset + size], checksum)
        if checksum != ticket.checksum:
            raise TicketLost(_WRONG)
        return memory

    def _sweep(self) -> None:
        """Remove what dead writers have left. Files of ours end by their own timers."""
        try:
            self._measure_clock()
            with os.scandir(self._folder) as entries:
                old = [entry.path for entry in entries if self._is_leftover(entry)]
        except OSError as error:
            log.warning("could not sweep --transfer-folder %s: %s", self._folder, error)
            return
        for path in old:
            _unlink(Path(path))
        if old:
            log.info("removed %d expired files from --transfer-folder %s", len(old), self._folder)

    def _is_leftover(self, entry: os.DirEntry[str]) -> bool:
        matched = _OURS.fullmatch(entry.name)
        if matched is None:
            return False
        finished = matched[1] == "safetensors"
        patience = EXPIRED_FILE_SECONDS if finished else UNFINISHED_FILE_SECONDS
        try:
            about = entry.stat(follow_symlinks=False)
        except FileNotFoundError:
            return False
        return stat.S_ISREG(about.st_mode) and about.st_mtime + patience < self._now()


def _header(parts: Sequence[TensorSpec], sizes: Sequence[int]) -> bytes:
    """The safetensors header for these parts, one behind the other without gaps."""
    ends = list(itertools.accumulate(sizes))
    described = {}
    for index, (part, size, end) in enumerate(zip(parts, sizes, ends, strict=True)):
        shape = (*part.shape, 2) if part.dtype == "complex128" else part.shape
        described[str(index)] = {
            "dtype": _DTYPES[part.dtype],
            "shape": shape,
            "data_offsets": (end - size, end),
        }
    text = msgspec.json.encode(described)
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _write_all(file: FileIO, data: memoryview) -> None:
    while data.nbytes:
        data = data[file.write(data) :]


def _read_all(file: FileIO, into: memoryview) -> None:
    while into.nbytes:
        count = file.readinto(into)
        if not count:
            raise TicketLost(_WRONG)
        into = into[count:]


def _unlink(path: Path) -> None:
    """Remove a file, if it is there. One that cannot be removed is left to the sweep."""
    try:
        path.unlink(missing_ok=True)
    except OSError as error:
        log.warning("could not remove %s: %s", path, error)
