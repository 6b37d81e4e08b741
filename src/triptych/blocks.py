"""Names of the blocks of a prompt, by which workers tell and frontends ask what is cached where.

A name chains over all that comes before: the tenant's salt, the tokens, and the media among them.
It is for routing and nothing else: engines find their own blocks by hashes of their own, so two
blocks of one name cost a detour and never a wrong token. Knows no engine and no worker.
"""

from __future__ import annotations

import hashlib
import struct
from array import array
from collections.abc import Iterator, Sequence

MediaInBlock = tuple[bytes, int]  # key of a media item, and the index of its first token

_NAME = struct.Struct("<Q")


def hash_salt(salt: str) -> int:
    """What stands before the first block of a tenant's prompts."""
    return _name(hashlib.blake2b(b"salt:" + salt.encode(), digest_size=8))


def hash_blocks(
    parent: int,
    tokens: Sequence[int],
    block_size: int,
    media: Sequence[Sequence[MediaInBlock]] = (),
) -> Iterator[int]:
    """Names of the full blocks of ``tokens``, which follow on the block ``parent``.

    ``media`` has, of each block, the items that stand in it, wholly or in part; their indices count
    from the first of ``tokens`` and are negative where an item begins before it. None: there are no
    media in any.
    """
    for block, begin in enumerate(range(0, len(tokens) - block_size + 1, block_size)):
        digest = hashlib.blake2b(_NAME.pack(parent), digest_size=8)
        digest.update(array("q", tokens[begin : begin + block_size]))
        for key, start in media[block] if media else ():
            digest.update(key)
            digest.update(struct.pack("<q", start - begin))
        parent = _name(digest)
        yield parent


def _name(digest: hashlib.blake2b) -> int:
    return int(_NAME.unpack(digest.digest())[0])
