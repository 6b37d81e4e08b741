"""What an engine that moves tensors itself tells its own kind on another worker: a note.

It goes where arrays go, as one of bytes, so that tickets and leases know nothing of it. A note is
JSON: it may come from another host, and nothing but data is read from it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from triptych.engines.base import Allocate
from triptych.errors import TicketLost
from triptych.transfer.base import Array


def write_note(empty: Allocate, note: dict[str, Any]) -> Array:
    text = msgspec.json.encode(note)
    array = empty("uint8", (len(text),))
    array.buffer[:] = text
    return array


def read_note(arrays: Sequence[Array]) -> dict[str, Any]:
    if len(arrays) != 1:
        raise TicketLost(f"one note was expected, and {len(arrays)} arrays came.")
    try:
        note: dict[str, Any] = msgspec.json.decode(bytes(arrays[0].buffer), type=dict[str, Any])
    except msgspec.DecodeError as error:
        raise TicketLost(f"what prefill handed over is no note: {error}") from None
    return note
