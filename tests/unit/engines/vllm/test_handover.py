"""A note is accepted only if it can be of the prompt at hand."""

import json

import pytest

from support.torch_engine import empty
from triptych.engines.adapter.base import read_note, write_note
from triptych.engines.vllm.requests import KvNote, check_kv_note
from triptych.errors import TicketLost

NOTE = {  # as vLLM 0.32 gives it
    "do_remote_prefill": True,
    "do_remote_decode": False,
    "remote_block_ids": [[1, 2]],
    "remote_engine_id": "b2a448ee-402c-4dd6-91d5-141a36a734ef",
    "remote_request_id": "5da04187-90bb8fed",
    "remote_host": "127.0.0.1",
    "remote_port": 18607,
    "tp_size": 1,
    "dcp_size": 1,
    "pp_size": 1,
    "remote_num_tokens": 46,
    "remote_blocks_expiry_time": None,
    "transfer_mode": "pull",
    "remote_prefill_cached_tokens": 0,
}


def check(note, tokens, block_size, groups):
    """As decode reads what prefill wrote."""
    read = read_note([write_note(empty, note)], KvNote)
    return check_kv_note(read, tokens, block_size, groups)


def test_a_note_goes_on_as_it_was_read():
    assert json.loads(json.dumps(check(NOTE, 46, 32, 1))) == NOTE
    both = NOTE | {"remote_block_ids": [[1, 2], [7, 8]]}
    assert check(both, 46, 32, 2)["remote_block_ids"] == [[1, 2], [7, 8]]


@pytest.mark.parametrize(
    "change",
    [
        {"remote_num_tokens": 45},
        {"remote_num_tokens": 47},
        {"remote_block_ids": [[1]]},
        {"remote_block_ids": [[1, 2], [7, 8]]},
        {"remote_block_ids": []},
        {"remote_block_ids": [[1, 1 << 40]]},
        {"remote_block_ids": [1, 2]},
        {"remote_block_ids": None},
        {"remote_block_ids": [[1, -2]]},
        {"remote_engine_id": None},
        {"remote_request_id": 7},
        {"remote_port": "18607"},
        {"remote_port": 0},
        {"remote_port": 70000},
        {"remote_host": ""},
        {"tp_size": 0},
        {"tp_size": 1 << 40},
        {"dcp_size": "1"},
        {"pp_size": 0},
        {"remote_blocks_expiry_time": "soon"},
        {"remote_block_size": 0},
        {"do_remote_decode": True},
        {"do_remote_prefill": False},
        {"transfer_mode": "push"},
    ],
    ids=str,
)
def test_a_note_that_cannot_be_right_is_a_lost_ticket(change):
    with pytest.raises(TicketLost):
        check(NOTE | change, 46, 32, 1)


def test_every_group_of_layers_holds_the_prompt():
    with pytest.raises(TicketLost, match="1 blocks"):
        check(NOTE | {"remote_block_ids": [[1, 2], [1]]}, 46, 32, 2)


@pytest.mark.parametrize("name", ["remote_engine_id", "remote_port", "remote_block_ids", "tp_size"])
def test_a_note_that_lacks_something_is_a_lost_ticket(name):
    with pytest.raises(TicketLost):
        check({k: v for k, v in NOTE.items() if k != name}, 46, 32, 1)
