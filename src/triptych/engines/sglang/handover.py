"""The note by which decode finds prefill: checked before SGLang may act on it.

SGLang takes what it is told: of one host's name it makes believe that a KV cache came, and decodes
from what was never written. Whether prefill is still there SGLang finds out by itself; then the
request fails alone.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from typing import Annotated

import msgspec
from msgspec import Meta, Struct

from triptych.engines.adapter import notes
from triptych.errors import EngineFailed, TicketLost
from triptych.transfer.base import Array

ROOM_BITS = 63  # bits of a room's number


class BootstrapAddress(Struct, frozen=True, forbid_unknown_fields=True):
    """Where decode meets prefill; the host is a name or an address, nothing else of a URL."""

    host: Annotated[str, Meta(max_length=253, pattern=r"^[0-9A-Za-z.:_-]+\Z")]
    port: Annotated[int, Meta(ge=1, le=65535)]
    room: Annotated[int, Meta(ge=0, le=(1 << ROOM_BITS) - 1)]


def new_bootstrap_address(host: str, port: int) -> BootstrapAddress:
    """In a room that no other request has."""
    return BootstrapAddress(host, port, secrets.randbits(ROOM_BITS))


def read_bootstrap_address(arrays: Sequence[Array], pretended: str) -> BootstrapAddress:
    """What prefill's note says; TicketLost if it can't be one.

    ``pretended``: the host for which SGLang makes believe.
    """
    try:
        place = msgspec.convert(notes.read_note(arrays), BootstrapAddress)
    except (EngineFailed, msgspec.ValidationError) as error:
        raise TicketLost(f"prefill's note can't be read: {error}") from None
    if place.host == pretended:
        raise TicketLost("prefill's note names no place: nothing was prefilled there")
    return place
