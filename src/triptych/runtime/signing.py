"""Signatures on what stands in discovery: workers of the cluster alone can write an entry.

An entry is signed with a key that is derived from the cluster secret, together with its namespace
and the worker's id. So an address in discovery is one that a worker of this cluster has chosen. A
signature says nothing about time: an old entry may be shown again, and leads to a worker that is
gone or to the right one, since the hello names the incarnation.
"""

from __future__ import annotations

import hmac

import msgspec
from msgspec import Raw, Struct

from triptych.runtime.authentication import derive, equal


class _Signed(Struct, frozen=True):
    signature: str
    entry: Raw  # the bytes that were signed, whatever a newer version has put there


_decode = msgspec.json.Decoder(_Signed).decode


class Signer:
    """Signs and checks the entries of one namespace."""

    def __init__(self, secret: str, namespace: str = "") -> None:
        self._key = derive(secret, "discovery entries", namespace.encode())

    def sign(self, worker_id: str, entry: bytes) -> bytes:
        """The JSON of an entry, with its signature."""
        return msgspec.json.encode(_Signed(self._signature(worker_id, entry), Raw(entry)))

    def open(self, worker_id: str, value: bytes) -> tuple[bytes, bool]:
        """The entry in ``value``, and whether this cluster has signed it for this worker."""
        try:
            signed = _decode(value)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            return value, False
        entry = bytes(signed.entry)
        expected = self._signature(worker_id, entry)
        return entry, equal(expected.encode(), signed.signature.encode())

    def _signature(self, worker_id: str, entry: bytes) -> str:
        worker = worker_id.encode(errors="surrogateescape")  # a file's name may be any bytes
        return hmac.digest(self._key, worker + b"\0" + entry, "sha256").hex()
