"""The note by which prefill's KV cache is found: checked before vLLM may act on it.

vLLM takes what it is told: a note of the wrong shape ends the decoding engine, and one of fewer
tokens lets it read what was never written. So it gets what is known here and nothing else. Whether
the blocks are still there only its connector can tell; then the request fails alone.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Struct

from triptych.errors import TicketLost

PREFILL_PARAMS = {  # what prefill's request says of itself
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
    """All that vLLM's connector says of prefilled blocks."""

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
    """The note, for a prompt of so many tokens in a KV cache of so many groups of layers;
    TicketLost if it can't be of that prompt."""
    try:
        read = msgspec.convert(note, KvNote)
    except msgspec.ValidationError as error:
        raise TicketLost(f"prefill's note can't be read: {error}") from None
    blocks = -(-tokens // block_size)
    held = [len(group) for group in read.remote_block_ids]
    if len(held) != groups:
        raise TicketLost(f"prefill's note is of {len(held)} groups of layers, not {groups}")
    if read.remote_num_tokens != tokens or not held or min(held) < blocks:
        raise TicketLost(
            f"prefill's note is of {read.remote_num_tokens} tokens in {min(held, default=0)} "
            f"blocks; {tokens} in {blocks} were expected"
        )
    found: dict[str, Any] = msgspec.to_builtins(read)
    return found
