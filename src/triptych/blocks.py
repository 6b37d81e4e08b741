"""Hashes of the blocks of a prompt, for routing: workers report them and frontends look them up.

A hash chains over everything before it: the tenant's salt, the tokens, and the media among them.
Engines find their blocks by hashes of their own, so a collision here costs a cache hit and never a
wrong token. Knows no engine and no worker.
"""

from __future__ import annotations

import hashlib
import struct
from array import array
from collections.abc import Iterator, Sequence

MediaInBlock = tuple[bytes, int]  # key of a media item, and the index of its first token

_HASH = struct.Struct("<Q")


def hash_salt(salt: str) -> int:
    """The parent of the first block of a tenant's prompts."""
    return _to_int(hashlib.blake2b(b"salt:" + salt.encode(), digest_size=8))


def hash_blocks(
    parent: int,
    tokens: Sequence[int],
    block_size: int,
    media: Sequence[Sequence[MediaInBlock]] = (),
) -> Iterator[int]:
    """Hash the full blocks of ``tokens``, which follow the block ``parent``.

    ``media``: the items in each block, wholly or in part; their starts count from the first of
    ``tokens`` and are negative for an item that begins before it. Empty: there are no media.
    """
    for block, begin in enumerate(range(0, len(tokens) - block_size + 1, block_size)):
        digest = hashlib.blake2b(_HASH.pack(parent), digest_size=8)
        digest.update(array("q", tokens[begin : begin + block_size]))
        for key, start in media[block] if media else ():
            digest.update(key)
            digest.update(struct.pack("<q", start - begin))
        parent = _to_int(digest)
        yield parent


def _to_int(digest: hashlib.blake2b) -> int:
    return int(_HASH.unpack(digest.digest())[0])
