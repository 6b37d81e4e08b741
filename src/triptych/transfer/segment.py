"""A segment of shared memory: an anonymous file that two processes map.

It has no name in any file system, so a SIGKILL leaks nothing: the kernel frees it with its last
user. A reader of the same user opens it through ``/proc/<pid>/fd/<fd>`` of the owner. Its first
page identifies it and holds a table of the tickets that are open on it: by that table a reader
knows that the contents are still those of its ticket. Readers keep their maps (``SegmentMaps``),
because mapping is slow and reading is not. Knows no transport and no pool.
"""

from __future__ import annotations

import asyncio
import ctypes
import fcntl
import functools
import hashlib
import mmap
import os
import stat
import struct
import weakref
from collections import OrderedDict
from pathlib import Path
from typing import TypeAlias

from triptych.transfer.base import run_sized

PAGE = 4096
MAGIC = b"triptych"
MEMFD_NAME = "triptych"
_IDENTITY = struct.Struct("@8s16sQQ")  # magic, nonce, epoch, bytes behind the page
_TABLE = 64  # bytes before the table of open tickets
SLOTS = (PAGE - _TABLE) // 8
_COPY_STEP = 256 << 10  # bytes that are copied while other threads wait
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL

# Memory as an object. Everything made from it (a memoryview, a slice of it, a tensor) keeps it
# alive, and a finalizer does what has to happen when the last of them is gone.
Memory: TypeAlias = "ctypes.Array[ctypes.c_ubyte]"

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [
    ctypes.c_void_p,
    ctypes.c_size_t,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_long,
]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
_FAILED = ctypes.c_void_p(-1).value
_HUGEPAGE, _POPULATE_READ, _POPULATE_WRITE = 14, 22, 23  # MADV_, which the mmap module has not all

HUGE_PAGE_BYTES = 8 << 20  # bytes from which on we ask for huge pages: a part of one may be wasted
_HUGE_SETTING = Path("/sys/kernel/mm/transparent_hugepage/shmem_enabled")


@functools.cache
def huge_pages() -> bool:
    """Whether this machine gives huge pages to shared memory that asks for them.

    Copies between processes are twice as fast with them. Most kernels are set to ``never``, and
    those before 5.14 cannot give memory at once that was not allocated before.
    """
    try:
        setting = _HUGE_SETTING.read_text()
    except OSError:
        return False
    page = (ctypes.c_ubyte * (2 * PAGE))()
    start = -(-ctypes.addressof(page) // PAGE) * PAGE
    populates = _libc.madvise(start, PAGE, _POPULATE_WRITE) == 0
    return populates and ("[advise]" in setting or "[always]" in setting)


@functools.cache
def memory_domain() -> str:
    """Equal in two processes only if each can open the other's memory.

    Of the boot and of the namespaces of processes and of networks: containers of one machine are
    hosts of their own.
    """
    digest = hashlib.sha256(Path("/proc/sys/kernel/random/boot_id").read_bytes())
    for kind in ("pid", "net"):
        about = os.stat(f"/proc/self/ns/{kind}")
        digest.update(f" {about.st_dev}:{about.st_ino}".encode())
    return digest.hexdigest()[:32]


def map_file(fd: int, size: int, *, writable: bool) -> Memory:
    """Map a file; it is unmapped when the last view of it is gone. Keeps no descriptor.

    The mmap module is not used because it holds a second descriptor for every map, and because its
    read-only maps give read-only buffers, which tensor libraries refuse or warn of.
    """
    protection = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
    huge = size >= HUGE_PAGE_BYTES and huge_pages()
    # Populated at once: one call instead of a page fault for every 4 KiB of the first use.
    flags = mmap.MAP_SHARED | (0 if huge else mmap.MAP_POPULATE)
    address = _libc.mmap(None, size, protection, flags, fd, 0)
    if address == _FAILED:
        raise _error()
    memory = (ctypes.c_ubyte * size).from_address(address)
    weakref.finalize(memory, _libc.munmap, address, size).atexit = False
    if huge:
        _libc.madvise(address, size, _HUGEPAGE)
        if _libc.madvise(address, size, _POPULATE_WRITE if writable else _POPULATE_READ):
            raise _error()
    return memory


def map_sealed_file(fd: int, size: int) -> Memory:
    """Map a sealed file for reading. Opens it again: older kernels map it in no other way."""
    reading = os.open(f"/proc/self/fd/{fd}", os.O_RDONLY | os.O_CLOEXEC)
    try:
        return map_file(reading, size, writable=False)
    finally:
        os.close(reading)


def _error() -> OSError:
    number = ctypes.get_errno()
    return OSError(number, os.strerror(number))


def byte_view(memory: Memory) -> memoryview:
    return memoryview(memory).cast("B")


def ticket_table(memory: Memory | memoryview) -> memoryview:
    """The open tickets' serials; 0 where there is none."""
    page = memory if isinstance(memory, memoryview) else byte_view(memory)
    return page[_TABLE:PAGE].cast("Q")


def segment_identity(page: memoryview) -> tuple[bytes, int, int] | None:
    """Nonce, epoch and capacity of the segment that a first page is of; None: of no segment."""
    magic, nonce, epoch, capacity = _IDENTITY.unpack_from(page)
    return (nonce, epoch, capacity) if magic == MAGIC else None


class Segment:
    """The owner's side. After ``close`` no reader can open it; its views keep the memory alive."""

    start = PAGE  # where in its memory the arrays begin

    def __init__(self, capacity: int, epoch: int) -> None:
        self.capacity = capacity
        self.nonce = os.urandom(16)
        self.fd = os.memfd_create(MEMFD_NAME, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        self._close_fd = weakref.finalize(self, os.close, self.fd)
        try:
            # All pages now: a shortage is an error here and not a SIGBUS at the first write.
            if PAGE + capacity >= HUGE_PAGE_BYTES and huge_pages():
                os.ftruncate(self.fd, PAGE + capacity)  # mapping it allocates them
            else:
                os.posix_fallocate(self.fd, 0, PAGE + capacity)
            # Nobody can truncate it any more, so no reader gets a SIGBUS either.
            fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, _SEALS)
            self.memory = map_file(self.fd, PAGE + capacity, writable=True)
        except OSError:
            self.close()
            raise
        _IDENTITY.pack_into(byte_view(self.memory), 0, MAGIC, self.nonce, epoch, capacity)
        self._table = ticket_table(self.memory)
        self._free = list(range(SLOTS))
        self.idle_since = 0.0  # when it returned to the pool

    def close(self) -> None:
        self._close_fd()

    @property
    def shareable(self) -> bool:
        """Whether one more ticket may be opened on it."""
        return bool(self._free)

    def add_ticket(self, serial: int) -> int:
        """Enter a ticket; returns its slot in the table."""
        slot = self._free.pop()
        self._table[slot] = serial
        return slot

    def remove_ticket(self, slot: int) -> None:
        """Remove a ticket: from here on its readers see that it is lost."""
        self._table[slot] = 0
        self._free.append(slot)

    def write(self, at: int, data: memoryview) -> None:
        """Copy into it, and let other threads run meanwhile."""
        target = byte_view(self.memory)[PAGE + at : PAGE + at + data.nbytes]
        if data.nbytes and not data.readonly:
            place, source = (ctypes.c_char.from_buffer(view) for view in (target, data))
            ctypes.memmove(ctypes.addressof(place), ctypes.addressof(source), data.nbytes)
            return
        # ctypes gives no address of read-only memory, and plain copies hold the interpreter.
        for start in range(0, data.nbytes, _COPY_STEP):
            target[start : start + _COPY_STEP] = data[start : start + _COPY_STEP]


class NotASegment(Exception):
    """A pid and descriptor do not, or no longer, lead to the segment that a ticket names."""


class AttachedSegment:
    """The reader's side: a map of another process's segment, which can be read and not written.

    A write through it is a segmentation fault: better than another request's wrong tokens.
    """

    def __init__(self, pid: int, fd: int, nonce: bytes, epoch: int) -> None:
        self._path = f"/proc/{pid}/fd/{fd}"
        try:
            # We look before we open: opening a pipe or a device could do something.
            if not os.readlink(self._path).startswith(f"/memfd:{MEMFD_NAME} "):
                raise NotASegment
            # Not to block, should the descriptor have become a pipe since.
            fd_here = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        except (OSError, ValueError):
            raise NotASegment from None
        try:
            self._map(fd_here, nonce, epoch)
        except OSError:
            raise NotASegment from None
        finally:
            os.close(fd_here)
        self.table = ticket_table(self.memory)
        self.body = byte_view(self.memory)[PAGE:]
        self.leads_to: Memory | None = None  # opened memory of a GPU that its body describes

    def _map(self, fd: int, nonce: bytes, epoch: int) -> None:
        about = os.fstat(fd)
        self._inode = (about.st_dev, about.st_ino)
        if not stat.S_ISREG(about.st_mode) or about.st_size <= PAGE:
            raise NotASegment
        if fcntl.fcntl(fd, fcntl.F_GET_SEALS) & _SEALS != _SEALS:
            raise NotASegment
        identity = (MAGIC, nonce, epoch, about.st_size - PAGE)
        if _IDENTITY.unpack(os.pread(fd, _IDENTITY.size, 0)) != identity:
            raise NotASegment
        self.memory = map_file(fd, about.st_size, writable=False)

    @property
    def capacity(self) -> int:
        return self.body.nbytes

    def alive(self) -> bool:
        """Whether the owner lives and still has it."""
        try:
            about = os.stat(self._path)
        except OSError:
            return False
        return (about.st_dev, about.st_ino) == self._inode


# A map keeps memory that its owner may have freed: for this long at most.
MAP_SWEEP_SECONDS = 2.0

MapKey = tuple[int, int, bytes, int]  # pid, descriptor, nonce, epoch


class SegmentMaps:
    """A reader's maps of others' segments. Views keep theirs alive, so dropping is safe."""

    def __init__(self, limit: int = 1024) -> None:
        self._limit = limit
        self._maps: OrderedDict[MapKey, AttachedSegment] = OrderedDict()
        self._timer: asyncio.TimerHandle | None = None

    def __len__(self) -> int:
        return len(self._maps)

    async def find(self, pid: int, fd: int, nonce: bytes, epoch: int, size: int) -> AttachedSegment:
        """The map of a segment, made now if need be. NotASegment if the owner has closed it."""
        key = (pid, fd, nonce, epoch)
        attached = self._maps.get(key)
        if attached is None or not attached.alive():
            attached = None
            self._drop(key)
            attached = await run_sized(size, AttachedSegment, pid, fd, nonce, epoch)
            self._maps[key] = attached
            if len(self._maps) > self._limit:
                self._drop(next(iter(self._maps)))
            self._arm()
        if key in self._maps:
            self._maps.move_to_end(key)
        return attached

    def sweep(self) -> None:
        """Drop the maps whose owner has closed the segment."""
        self._timer = None
        self._drop(*[key for key, attached in self._maps.items() if not attached.alive()])
        self._arm()

    def close(self) -> None:
        self._maps.clear()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _drop(self, *keys: MapKey) -> None:
        # In a thread: unmapping the last map of a large segment makes the kernel free it.
        gone = [self._maps.pop(key) for key in keys if key in self._maps]
        if gone:
            asyncio.get_running_loop().run_in_executor(None, gone.clear)

    def _arm(self) -> None:
        if self._maps and self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(MAP_SWEEP_SECONDS, self.sweep)
