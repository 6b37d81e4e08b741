"""Which blocks of a KV cache are whose, and which can be found again.

Blocks that nobody uses stay findable until their room is needed, the one unused for longest first.
Knows neither tensors nor requests, nor what a hash is made of.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence

NULL = 0  # a block that is never given out: what padding points to, always zero


class BlockPool:
    """``caching``: whether full blocks are kept to be found again. ``removed`` is told the hash of
    each that no longer is."""

    def __init__(
        self,
        blocks: int,
        *,
        caching: bool = True,
        removed: Callable[[bytes], None] = lambda digest: None,
    ) -> None:
        self.total = blocks
        self._removed = removed
        self._caching = caching
        self._unused = list(range(blocks, NULL, -1))  # popped from the end: low numbers first
        self._idle: OrderedDict[int, None] = OrderedDict()  # unreferenced, findable; oldest first
        self._references = [0] * (blocks + 1)
        self._block_of: dict[bytes, int] = {}
        self._hash_of: dict[int, bytes] = {}

    @property
    def free(self) -> int:
        """Blocks that ``take`` can give: unused ones, and those kept only for re-use."""
        return len(self._unused) + len(self._idle)

    def match(self, hashes: Sequence[bytes]) -> list[int]:
        """The longest run of known blocks from the start; they are referenced from now on."""
        found: list[int] = []
        for digest in hashes:
            block = self._block_of.get(digest)
            if block is None:
                break
            self._references[block] += 1
            self._idle.pop(block, None)
            found.append(block)
        return found

    def take(self, count: int) -> list[int]:
        """Blocks with nothing in them. The caller has looked at ``free``."""
        assert count <= self.free, f"{count} blocks taken, {self.free} free"
        taken = [self._unused.pop() if self._unused else self._evict() for _ in range(count)]
        for block in taken:
            self._references[block] = 1
        return taken

    def keep(self, block: int, digest: bytes) -> bool:
        """Make a full block findable. A second block with the same content stays private: False."""
        if not self._caching or digest in self._block_of or block in self._hash_of:
            return False
        self._block_of[digest] = block
        self._hash_of[block] = digest
        return True

    def keep_all(
        self, blocks: Sequence[int], digests: Sequence[bytes]
    ) -> Iterator[tuple[int, int]]:
        """``keep`` each; gives the runs of those that were not there before, from and to."""
        start = 0
        for at, (block, digest) in enumerate(zip(blocks, digests, strict=True)):
            if not self.keep(block, digest):
                if start < at:
                    yield start, at
                start = at + 1
        if start < len(blocks):
            yield start, len(blocks)

    def give_back(self, blocks: Sequence[int]) -> None:
        # The last block goes first, so that a prefix outlives what only follows on it.
        for block in reversed(blocks):
            self._references[block] -= 1
            assert self._references[block] >= 0, f"block {block} given back twice"
            if self._references[block]:
                continue
            if block in self._hash_of:
                self._idle[block] = None
            else:
                self._unused.append(block)

    def forget(self, blocks: Sequence[int]) -> list[int]:
        """Make blocks unfindable, as they are not to be trusted; give those nobody else uses."""
        for block in blocks:
            if block in self._hash_of:
                self._unlearn(block)
        return [block for block in blocks if self._references[block] == 1]

    def _evict(self) -> int:
        block, _ = self._idle.popitem(last=False)
        self._unlearn(block)
        return block

    def _unlearn(self, block: int) -> None:
        digest = self._hash_of.pop(block)
        del self._block_of[digest]
        self._removed(digest)
