"""Discovery in a directory: one file for each worker, with a lease and an epoch.

Readers see the records whose lease is live. No server is involved, so the only thing that can fail
is the directory itself. It is *away* while it cannot be read or while no lease can be written there
(the disk is full, broken or read-only). Then readers keep their last view and workers keep serving;
for one lease after its return a reader trusts its last view of workers that have not renewed yet.
All of it is for processes of one host. Nothing here talks to a worker.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import os
import threading
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from stat import S_ISREG
from typing import TypeVar

import msgspec
from msgspec import Struct

from triptych.errors import StartError
from triptych.host import host_id, is_running
from triptych.messages import WorkerRecord
from triptych.runtime.authentication import Signer
from triptych.runtime.discovery import DiscoveryStatus, check_name
from triptych.runtime.lease import LEASE_SECONDS, Clock, WorkerLease, boottime
from triptych.runtime.run_dir import check_writable

log = logging.getLogger(__name__)

MAX_RECORD = 1 << 20  # bytes in a worker's file

POLL_SECONDS = 0.2
SWEEP_SECONDS = 60.0  # a file is removed when its lease is over for so long
OVERDUE = 0.5  # of a lease without a renewal, after which readers check whether any can be written
PATIENCE = 0.4  # of a lease, for one write

T = TypeVar("T")


class _Entry(Struct, frozen=True):
    """The contents of a worker's file."""

    record: WorkerRecord
    expires: float  # of CLOCK_BOOTTIME


class _Found(Struct, frozen=True):
    """An entry as it was read, and whether this cluster has signed it."""

    entry: _Entry
    signed: bool


_decode = msgspec.json.Decoder(_Entry).decode


class Files:
    """The files of the workers of one cluster: plain calls that may wait for a disk."""

    def __init__(
        self,
        path: str | os.PathLike[str],
        secret: str = "",
        *,
        lease: float = LEASE_SECONDS,
        clock: Clock = boottime,
    ) -> None:
        self.path = Path(path)
        self._signer = Signer(secret)
        self.rejected: dict[str, WorkerRecord] = {}  # live, and not signed by this cluster
        self.lease = lease
        self.clock = clock
        self._scanning = threading.Lock()  # a view may be asked for while another one is made
        self._read: dict[str, tuple[tuple[int, int, int], _Found]] = {}  # by file name
        self._epochs: dict[str, int] = {}  # the newest seen of each worker
        self._view: dict[str, WorkerRecord] = {}
        self._trusted: dict[str, WorkerRecord] = {}  # not seen since the directory was away
        self._trust_until = float("-inf")
        self.away = False  # whether the directory could not be used at the last look

    def claim(self, worker_id: str) -> int:
        """A new epoch for this worker, greater than any before: its older incarnations are fenced.

        Two that race get two epochs. No lock is taken, so a process that is stopped amid this
        stops nobody else.
        """
        check_name("worker", worker_id)
        self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
        check_writable(self.path)
        while True:
            # The clock keeps epochs growing even when the directory was lost with its claims.
            epoch = max(self.newest(worker_id) + 1, int(self.clock() * 1000))
            try:
                os.close(os.open(self._claim(worker_id, epoch), os.O_CREAT | os.O_EXCL, 0o600))
            except FileExistsError:
                continue
            claims = list(self._claims(worker_id))
            if max(claims) == epoch:
                break
            # Someone was quicker, and may have removed the claim that ours should have stood after.
        for old in claims:
            if old < epoch:
                self._claim(worker_id, old).unlink(missing_ok=True)
                self._temporary(worker_id, old).unlink(missing_ok=True)
        return epoch

    def newest(self, worker_id: str) -> int:
        """The newest epoch of a worker that was claimed or registered; 0: none."""
        found = self.load(self.file(worker_id))
        registered = found.entry.record.epoch if found is not None and found.signed else 0
        return max(registered, *self._claims(worker_id), 0)

    def view(self) -> dict[str, WorkerRecord]:
        """The workers whose lease is live, by id. While the directory is away: the last view."""
        with self._scanning:
            try:
                found = self._scan()
            except OSError as error:
                self._stay(self._view, error)
                return dict(self._view)
            now = self.clock()
            self.rejected = {
                one.entry.record.id: one.entry.record
                for one in found
                if not one.signed and self._live(one.entry, now)
            }
            entries = self._newest_of([one.entry for one in found if one.signed])
            self._look_for_room([e.record for e in entries if self._overdue(e, now)])
            view = {e.record.id: e.record for e in entries if self._live(e, now)}
            for worker_id in view:
                self._trusted.pop(worker_id, None)
            if now < self._trust_until:
                view |= self._trusted
            self._view = view
            return dict(view)

    def _newest_of(self, entries: list[_Entry]) -> list[_Entry]:
        """Those that are not of an epoch before one that was seen."""
        newest = [e for e in entries if e.record.epoch >= self._epochs.get(e.record.id, 0)]
        now = self.clock()
        for entry in newest:
            if self._live(entry, now):
                self._epochs[entry.record.id] = entry.record.epoch
        return newest

    def _overdue(self, entry: _Entry, now: float) -> bool:
        """Whether a worker has not renewed lately and may live even so."""
        record = entry.record
        if entry.expires - now > (1 - OVERDUE) * self.lease:
            return False
        return self._view.get(record.id) == record or (
            record.host == host_id() and is_running(record)
        )

    def _look_for_room(self, overdue: list[WorkerRecord]) -> None:
        """Where no lease can be written, a lease that has run out says nothing of its worker."""
        if overdue:
            try:
                check_writable(self.path)
            except OSError as error:
                self._stay({record.id: record for record in overdue}, error)
                return
        if self.away and self._trusted:
            log.warning("the run directory %s can be used again", self.path)
        self.away = False

    def _stay(self, workers: dict[str, WorkerRecord], error: OSError) -> None:
        """Trust these until one lease after the directory's return."""
        if workers and not self.away:
            log.warning(
                "the run directory %s cannot be used (%s): going on with the workers known so far",
                self.path,
                error.strerror,
            )
        self.away = True
        self._trusted = dict(workers)
        self._trust_until = self.clock() + self.lease

    def sweep(self) -> None:
        """Remove the files of workers that are dead for long. Their claims stay."""
        now = self.clock()
        if now < self._trust_until:
            return  # the directory was away, and nobody could renew
        for path in self.path.glob("*.json"):
            found = self.load(path)
            if found is None:
                continue
            if not -SWEEP_SECONDS < found.entry.expires - now < 2 * self.lease:
                log.info("the file of worker %s is swept: its lease is long over", path.stem)
                with contextlib.suppress(OSError):  # a view needs no sweeping
                    path.unlink()

    def write(self, record: WorkerRecord) -> None:
        """Put the record in place with a fresh lease, in one step."""
        entry = _Entry(record, self.clock() + self.lease)
        temporary = self._temporary(record.id, record.epoch)
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
        try:
            with open(os.open(temporary, flags, 0o600), "wb") as file:
                file.write(self._signer.sign(record.id, msgspec.json.encode(entry)))
            temporary.replace(self.file(record.id))
        except OSError:
            with contextlib.suppress(OSError):
                temporary.unlink()
            raise

    def file(self, worker_id: str) -> Path:
        return self.path / f"{worker_id}.json"

    def load(self, path: Path) -> _Found | None:
        """The entry in a file; None where there is none, none of ours, or none that can be read."""
        try:
            return self._open(path)
        except OSError:
            return None

    def _open(self, path: Path) -> _Found | None:
        """The same; raises OSError where this process, or the disk, cannot read it now."""
        try:
            entry, signed = self._signer.open(path.stem, _contents(path))
            return _Found(_decode(entry), signed)
        except (FileNotFoundError, PermissionError):
            return None
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            return None

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
        """All readable entries; a file that has not changed is not read again."""
        read: dict[str, tuple[tuple[int, int, int], _Found]] = {}
        with os.scandir(self.path) as files:
            for file in files:
                if not file.name.endswith(".json") or not file.is_file(follow_symlinks=False):
                    continue
                with contextlib.suppress(FileNotFoundError):  # it may go while we look
                    stat = file.stat()
                    mark = (stat.st_ino, stat.st_mtime_ns, stat.st_size)
                    known = self._read.get(file.name)
                    found = known[1] if known and known[0] == mark else self._open(Path(file.path))
                    if found is not None and file.name == f"{found.entry.record.id}.json":
                        read[file.name] = mark, found
        self._read = read
        return [found for _, found in read.values()]

    def _live(self, entry: _Entry, now: float) -> bool:
        # A lease that ends far ahead was written before the host started anew.
        return 0 < entry.expires - now < 2 * self.lease


class Directory:
    """The directory where the workers of one cluster find each other."""

    def __init__(
        self,
        path: str | os.PathLike[str],
        secret: str = "",
        *,
        lease: float = LEASE_SECONDS,
        clock: Clock = boottime,
    ) -> None:
        self.files = Files(path, secret, lease=lease, clock=clock)

    async def claim(self, worker_id: str) -> int:
        """A new epoch for this worker, greater than any before: its older incarnations are fenced.

        Two that race get two epochs.
        """
        try:
            return await asyncio.to_thread(self.files.claim, worker_id)
        except OSError as error:
            raise StartError(
                f"worker {worker_id} cannot register: {self.files.path} cannot be written "
                f"({error.strerror}). Free some space there, or give all another --run-dir."
            ) from None

    async def register(self, record: WorkerRecord) -> WorkerLease:
        """Show this record to all readers until the lease is closed or lost."""
        check_name("worker", record.id)
        lease = WorkerLease(_Place(self.files), record, self.files.lease, self.files.clock)
        await lease.begin()
        return lease

    async def view(self) -> dict[str, WorkerRecord]:
        """The workers whose lease is live, by id. While the directory is away: the last view."""
        return await asyncio.to_thread(self.files.view)

    async def watch(self) -> AsyncGenerator[dict[str, WorkerRecord], None]:
        """The view now, and again whenever it has changed."""
        files, last = self.files, None
        swept = files.clock()
        with _thread("discovery-watch") as run:
            while True:
                view = await run(files.view)
                if (view, files.rejected) != last:
                    last = view, files.rejected
                    yield dict(view)
                if files.clock() - swept > files.lease:
                    swept = files.clock()
                    await run(files.sweep)
                await asyncio.sleep(POLL_SECONDS)

    async def others(self) -> tuple[str, ...]:
        """Nobody else is in a directory."""
        return ()

    async def watched(self) -> bool:
        """A directory does not show who reads it."""
        return False

    @property
    def rejected(self) -> Mapping[str, WorkerRecord]:
        return self.files.rejected

    @property
    def standing(self) -> DiscoveryStatus:
        return DiscoveryStatus(str(self.files.path), self.files.away)


class _Place:
    """One worker's file, with a thread of its own to write it.

    A disk that hangs is one that is away: whoever waits for it gets a TimeoutError.
    """

    def __init__(self, files: Files) -> None:
        self._files = files
        self._patience = PATIENCE * files.lease
        self._scope = contextlib.ExitStack()
        self._run = self._scope.enter_context(_thread("discovery-lease"))
        self._writing: asyncio.Future[bool] | None = None

    async def put(self, record: WorkerRecord) -> bool:
        if self._writing is None or self._writing.done():
            self._writing = self._run(lambda: self._put(record))
        async with asyncio.timeout(self._patience):
            return await asyncio.shield(self._writing)

    async def leave(self, record: WorkerRecord) -> None:
        with self._scope:
            async with asyncio.timeout(self._patience):
                await self._run(lambda: self._remove(record))

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


@contextlib.contextmanager
def _thread(name: str) -> Iterator[Callable[[Callable[[], T]], asyncio.Future[T]]]:
    """A thread of its own for file work: a full pool must not cost anyone a lease."""
    executor = ThreadPoolExecutor(1, thread_name_prefix=name)
    loop = asyncio.get_running_loop()
    try:
        yield lambda work: loop.run_in_executor(executor, work)
    finally:
        executor.shutdown(wait=False)  # the loop waits for no disk


def _contents(path: Path) -> bytes:
    """Of a regular file of a record's size; empty for anything else, and never waits for a peer."""
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
