"""A note is accepted only if it can be prefill's; all of it without SGLang."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from triptych.engines.adapter.base import write_note
from triptych.engines.sglang import requests
from triptych.errors import TicketLost
from triptych.transfer.base import Array

PRETENDED = "2.2.2.2"
NOTE = {"host": "127.0.0.1", "port": 18607, "room": 5}


def empty(dtype: str, shape: tuple[int, ...]) -> Array:
    return Array(memoryview(bytearray(*shape)), dtype, shape)


def read(note: dict[str, Any]) -> requests.BootstrapAddress:
    return requests.read_bootstrap_address([write_note(empty, note)], PRETENDED)


@pytest.mark.parametrize("host", ["127.0.0.1", "::1", "prefill-0.workers"])
def test_a_meeting_is_read_as_it_was_written(host: str):
    place = requests.new_bootstrap_address(host, 18607)
    assert read(msgspec.structs.asdict(place)) == place


def test_every_handover_has_its_own_bootstrap_room():
    assert len({requests.new_bootstrap_address("127.0.0.1", 1).room for _ in range(8)}) == 8


@pytest.mark.parametrize(
    "change",
    [
        {"host": PRETENDED},
        {"host": ""},
        {"host": None},
        {"host": "127.0.0.1/route?"},
        {"host": "127.0.0.1\n"},
        {"host": "me@elsewhere"},
        {"host": "a" * 254},
        {"port": 0},
        {"port": 65536},
        {"port": "18607"},
        {"room": -1},
        {"room": 1 << 63},
        {"room": None},
        {"more": 1},
    ],
    ids=str,
)
def test_a_note_that_cannot_be_right_is_a_lost_ticket(change: dict[str, Any]):
    assert read(NOTE)
    with pytest.raises(TicketLost):
        read(NOTE | change)


@pytest.mark.parametrize("name", NOTE)
def test_a_note_that_lacks_something_is_a_lost_ticket(name: str):
    with pytest.raises(TicketLost):
        read({key: value for key, value in NOTE.items() if key != name})


@pytest.mark.parametrize("texts", [[], [b"no note"], [b"[]"], [b"{}", b"{}"]], ids=str)
def test_an_array_that_is_not_a_note_is_a_lost_ticket(texts: list[bytes]):
    arrays = [Array(memoryview(text), "uint8", (len(text),)) for text in texts]
    with pytest.raises(TicketLost):
        requests.read_bootstrap_address(arrays, PRETENDED)
