"""Discovery in a directory: one file for each worker of this host, with a lease and an epoch.

Readers see the records whose lease has not expired. There is no server: only the directory itself
can fail. It is *away* while it cannot be read or no lease can be written to it (the disk is full,
broken or read-only). Meanwhile readers keep their last view and workers keep serving; for one lease
after its return a reader trusts its last view of workers that have not renewed yet.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import os
import threading
from collections.abc import AsyncGenerator, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from stat import S_ISREG

from msgspec import Struct

from triptych.errors import StartError
from triptych.host import boot_time, host_id, is_running
from triptych.messages import WorkerRecord
from triptych.runtime.authentication import EntrySigner
from triptych.runtime.discovery import DiscoveryStatus, check_name, register
from triptych.runtime.lease import LEASE_SECONDS, Clock, WorkerLease
from triptych.runtime.run_dir import check_writable

log = logging.getLogger(__name__)

MAX_RECORD = 1 << 20  # bytes in a worker's file
POLL_SECONDS = 0.2
SWEEP_SECONDS = 60.0  # after the end of its lease a file is removed
OVERDUE = 0.5  # of a lease without a renewal, after which readers check if the disk is writable
WRITE_TIMEOUT = 0.4  # of a lease


class _FileEntry(Struct, frozen=True):
    """The contents of a worker's file."""

    record: WorkerRecord
    expires: float  # of CLOCK_BOOTTIME


class _Found(Struct, frozen=True):
    """An entry that was read, and whether this cluster signed it."""

    entry: _FileEntry
    signed: bool


class WorkerFiles:
    """The files of the workers of one cluster. Its calls may block on the disk."""

    def __init__(
        self,
        path: str | os.PathLike[str],
        secret: str = "",
        *,
        lease: float = LEASE_SECONDS,
        clock: Clock = boot_time,
    ) -> None:
        self.path = Path(path)
        self._signer = EntrySigner(_FileEntry, secret)
        self.rejected: dict[str, WorkerRecord] = {}  # live, but not signed by this cluster
        self.lease = lease
        self.clock = clock
        self._scanning = threading.Lock()  # two threads may read a view at once
        self._read: dict[str, tuple[tuple[int, int, int], _Found]] = {}  # by file name
        self._epochs: dict[str, int] = {}  # the newest known of each worker
        self._view: dict[str, WorkerRecord] = {}
        self._trusted: dict[str, WorkerRecord] = {}  # not renewed since the directory was away
        self._trust_until = float("-inf")
        self.away = False  # whether the directory could not be used at the last try

    def claim(self, worker_id: str) -> int:
        """See ``Discovery.claim``. Takes no lock: a process stopped here blocks no other one."""
        check_name("worker", worker_id)
        self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
        check_writable(self.path)
        while True:
            # The clock keeps epochs growing even if the directory was deleted with its claims.
            epoch = max(self.newest(worker_id) + 1, int(self.clock() * 1000))
            try:
                os.close(os.open(self._claim(worker_id, epoch), os.O_CREAT | os.O_EXCL, 0o600))
            except FileExistsError:
                continue
            claims = list(self._claims(worker_id))
            if max(claims) == epoch:
                break
            # Another process was faster, and may have removed the claim that ours had to exceed.
        for old in claims:
            if old < epoch:
                self._claim(worker_id, old).unlink(missing_ok=True)
                self._temporary(worker_id, old).unlink(missing_ok=True)
        return epoch

    def newest(self, worker_id: str) -> int:
        """The newest claimed or registered epoch of a worker; 0: none."""
        found = self.load(self.file(worker_id))
        registered = found.entry.record.epoch if found is not None and found.signed else 0
        return max(registered, *self._claims(worker_id), 0)

    def view(self) -> dict[str, WorkerRecord]:
        """See ``Discovery.view``."""
        with self._scanning:
            try:
                found = self._scan()
            except OSError as error:
                self._trust(self._view, error)
                return dict(self._view)
            now = self.clock()
            self.rejected = {
                one.entry.record.id: one.entry.record
                for one in found
                if not one.signed and self._live(one.entry, now)
            }
            entries = self._without_old_epochs([one.entry for one in found if one.signed])
            self._check_writable([e.record for e in entries if self._overdue(e, now)])
            view = {e.record.id: e.record for e in entries if self._live(e, now)}
            for worker_id in view:
                self._trusted.pop(worker_id, None)
            if now < self._trust_until:
                view |= self._trusted
            self._view = view
            return dict(view)

    def _without_old_epochs(self, entries: list[_FileEntry]) -> list[_FileEntry]:
        """Leaves out entries of an older epoch than the newest known one."""
        newest = [e for e in entries if e.record.epoch >= self._epochs.get(e.record.id, 0)]
        now = self.clock()
        for entry in newest:
            if self._live(entry, now):
                self._epochs[entry.record.id] = entry.record.epoch
        return newest

    def _overdue(self, entry: _FileEntry, now: float) -> bool:
        """Whether a worker has not renewed lately but may still run."""
        record = entry.record
        if entry.expires - now > (1 - OVERDUE) * self.lease:
            return False
        return self._view.get(record.id) == record or (
            record.host == host_id() and is_running(record)
        )

    def _check_writable(self, overdue: list[WorkerRecord]) -> None:
        """If no lease can be written, an expired lease does not mean that its worker is dead."""
        if overdue:
            try:
                check_writable(self.path)
            except OSError as error:
                self._trust({record.id: record for record in overdue}, error)
                return
        if self.away and self._trusted:
            log.warning("run directory %s can be used again", self.path)
        self.away = False

    def _trust(self, workers: dict[str, WorkerRecord], error: OSError) -> None:
        """Trust these until one lease after the directory's return."""
        if workers and not self.away:
            log.warning(
                "run directory %s cannot be used (%s): keeping the workers known so far",
                self.path,
                error.strerror,
            )
        self.away = True
        self._trusted = dict(workers)
        self._trust_until = self.clock() + self.lease

    def sweep(self) -> None:
        """Remove the files of workers that died long ago. Their claims stay."""
        now = self.clock()
        if now < self._trust_until:
            return  # the directory was away: no worker could renew
        for path in self.path.glob("*.json"):
            found = self.load(path)
            if found is None:
                continue
            if not -SWEEP_SECONDS < found.entry.expires - now < 2 * self.lease:
                log.info("removing the file of worker %s: its lease expired long ago", path.stem)
                with contextlib.suppress(OSError):  # views do not depend on it
                    path.unlink()

    def write(self, record: WorkerRecord) -> None:
        """Write the record with a fresh lease, atomically."""
        entry = _FileEntry(record, self.clock() + self.lease)
        temporary = self._temporary(record.id, record.epoch)
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
        try:
            with open(os.open(temporary, flags, 0o600), "wb") as file:
                file.write(self._signer.encode(record.id, entry))
            temporary.replace(self.file(record.id))
        except OSError:
            with contextlib.suppress(OSError):
                temporary.unlink()
            raise

    def file(self, worker_id: str) -> Path:
        return self.path / f"{worker_id}.json"

    def load(self, path: Path) -> _Found | None:
        """The entry in a file; None: there is no valid one, or it cannot be read now."""
        try:
            return self._open(path)
        except OSError:
            return None

    def _open(self, path: Path) -> _Found | None:
        """The same, but raises OSError if the disk cannot be read."""
        try:
            entry, signed = self._signer.decode(path.stem, _contents(path))
        except (FileNotFoundError, PermissionError):
            return None
        return None if entry is None else _Found(entry, signed)

    def _claim(self, worker_id: str, epoch: int) -> Path:
        return self.path / f"{worker_id}.{epoch}.claim"

    def _temporary(self, worker_id: str, epoch: int) -> Path:
        return self.path / f"{worker_id}.{epoch}.tmp"

    def _claims(self, worker_id: str) -> Iterator[int]:
        start = f"{worker_id}."
        for name in os.listdir(self.path):
            middle = name.removeprefix(start).removesuffix(".claim")
            if name == f"{start}{middle}.claim" and middle.isdecimal():
                yield int(middle)

    def _scan(self) -> list[_Found]:
        """All valid entries. Reads only files that have changed."""
        read: dict[str, tuple[tuple[int, int, int], _Found]] = {}
        with os.scandir(self.path) as files:
            for file in files:
                if not file.name.endswith(".json") or not file.is_file(follow_symlinks=False):
                    continue
                with contextlib.suppress(FileNotFoundError):  # removed meanwhile
                    stat = file.stat()
                    mark = (stat.st_ino, stat.st_mtime_ns, stat.st_size)
                    known = self._read.get(file.name)
                    found = known[1] if known and known[0] == mark else self._open(Path(file.path))
                    if found is not None and file.name == f"{found.entry.record.id}.json":
                        read[file.name] = mark, found
        self._read = read
        return [found for _, found in read.values()]

    def _live(self, entry: _FileEntry, now: float) -> bool:
        # A lease that ends far in the future was written before a reboot.
        return 0 < entry.expires - now < 2 * self.lease


class Directory:
    """The directory where the workers of one cluster on this host register: see ``Discovery``."""

    def __init__(
        self,
        path: str | os.PathLike[str],
        secret: str = "",
        *,
        lease: float = LEASE_SECONDS,
        clock: Clock = boot_time,
    ) -> None:
        self.files = WorkerFiles(path, secret, lease=lease, clock=clock)

    async def claim(self, worker_id: str) -> int:
        try:
            return await asyncio.to_thread(self.files.claim, worker_id)
        except OSError as error:
            raise StartError(
                f"worker {worker_id} cannot register: {self.files.path} cannot be written "
                f"({error.strerror}). Free some space there, or give all another --run-dir."
            ) from None

    async def register(self, record: WorkerRecord) -> WorkerLease:
        registration = _FileRegistration(self.files)
        return await register(registration, record, self.files.lease, self.files.clock)

    async def view(self) -> dict[str, WorkerRecord]:
        return await asyncio.to_thread(self.files.view)

    async def watch(self) -> AsyncGenerator[dict[str, WorkerRecord], None]:
        files, last = self.files, None
        swept = files.clock()
        loop, thread = asyncio.get_running_loop(), _thread("discovery-watch")
        try:
            while True:
                view = await loop.run_in_executor(thread, files.view)
                if (view, files.rejected) != last:
                    last = view, files.rejected
                    yield dict(view)
                if files.clock() - swept > files.lease:
                    swept = files.clock()
                    await loop.run_in_executor(thread, files.sweep)
                await asyncio.sleep(POLL_SECONDS)
        finally:
            thread.shutdown(wait=False)  # do not wait for the disk

    async def others(self) -> tuple[str, ...]:
        """A directory has no namespaces."""
        return ()

    async def watched(self) -> bool:
        """A directory does not show its readers."""
        return False

    @property
    def rejected(self) -> Mapping[str, WorkerRecord]:
        return self.files.rejected

    @property
    def status(self) -> DiscoveryStatus:
        return DiscoveryStatus(str(self.files.path), self.files.away)


class _FileRegistration:
    """One worker's file, written by a thread of its own. A disk that hangs raises TimeoutError."""

    def __init__(self, files: WorkerFiles) -> None:
        self._files = files
        self._timeout = WRITE_TIMEOUT * files.lease
        self._loop = asyncio.get_running_loop()
        self._thread = _thread("discovery-lease")
        self._writing: asyncio.Future[bool] | None = None

    async def put(self, record: WorkerRecord) -> bool:
        if self._writing is None or self._writing.done():
            self._writing = self._loop.run_in_executor(self._thread, self._put, record)
        async with asyncio.timeout(self._timeout):
            return await asyncio.shield(self._writing)

    async def remove(self, record: WorkerRecord) -> None:
        try:
            async with asyncio.timeout(self._timeout):
                await self._loop.run_in_executor(self._thread, self._remove, record)
        finally:
            self._thread.shutdown(wait=False)  # do not wait for the disk

    def _put(self, record: WorkerRecord) -> bool:
        if self._files.newest(record.id) > record.epoch:
            return False
        self._files.write(record)
        return True

    def _remove(self, record: WorkerRecord) -> None:
        path = self._files.file(record.id)
        found = self._files.load(path)
        if found is not None and found.signed and found.entry.record.epoch == record.epoch:
            path.unlink(missing_ok=True)


def _thread(name: str) -> ThreadPoolExecutor:
    """A thread for file work: a full default pool must not make a worker lose its lease."""
    return ThreadPoolExecutor(1, thread_name_prefix=name)


def _contents(path: Path) -> bytes:
    """The bytes of a regular file of a record's size; empty for anything else. Never blocks on a
    pipe."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENXIO):  # a link, or a socket
            return b""
        raise
    with open(fd, "rb", buffering=0) as file:
        stat = os.fstat(fd)
        if not S_ISREG(stat.st_mode) or stat.st_size > MAX_RECORD:
            return b""
        return file.read(MAX_RECORD) or b""
