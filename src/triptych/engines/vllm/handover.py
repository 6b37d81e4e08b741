"""The note that tells decode where prefill's KV cache is, checked before vLLM reads it.

vLLM does not check it: a note of the wrong shape ends the decode engine, and a note of too few
tokens makes it read memory that was never written. Only vLLM's connector can tell whether the
blocks still exist; if not, that request fails alone.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Struct

from triptych.errors import TicketLost

PREFILL_PARAMS = {  # the kv_transfer_params of a prefill request
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}

Name = Annotated[str, Meta(min_length=1)]
Port = Annotated[int, Meta(ge=1, le=65535)]
Block = Annotated[int, Meta(ge=0, lt=1 << 31)]
Count = Annotated[int, Meta(ge=0, lt=1 << 31)]
Ranks = Annotated[int, Meta(ge=1, le=1024)]


class KvNote(Struct, frozen=True, forbid_unknown_fields=True):
    """All fields that vLLM's connector reports of prefilled blocks."""

    remote_engine_id: Name
    remote_request_id: Name
    remote_host: Name
    remote_port: Port
    remote_block_ids: list[list[Block]]  # by group of layers
    remote_num_tokens: Count
    tp_size: Ranks
    do_remote_prefill: Literal[True]
    transfer_mode: Literal["pull"]
    do_remote_decode: Literal[False] = False
    dcp_size: Ranks = 1
    pp_size: Ranks = 1
    remote_blocks_expiry_time: float | None = None
    remote_prefill_cached_tokens: Count | None = None


def check_kv_note(
    note: dict[str, Any], tokens: int, block_size: int, groups: int
) -> dict[str, Any]:
    """The checked note; TicketLost if it cannot belong to this prompt.

    ``tokens``: of the prompt; ``groups``: groups of layers in the KV cache.
    """
    try:
        checked = msgspec.convert(note, KvNote)
    except msgspec.ValidationError as error:
        raise TicketLost(f"prefill handed over an invalid note: {error}") from None
    blocks = -(-tokens // block_size)
    held = [len(group) for group in checked.remote_block_ids]
    if len(held) != groups:
        raise TicketLost(f"prefill's note has {len(held)} groups of layers, not {groups}")
    if checked.remote_num_tokens != tokens or not held or min(held) < blocks:
        raise TicketLost(
            f"prefill's note has {checked.remote_num_tokens} tokens in {min(held, default=0)} "
            f"blocks, not {tokens} in {blocks}"
        )
    found: dict[str, Any] = msgspec.to_builtins(checked)
    return found
