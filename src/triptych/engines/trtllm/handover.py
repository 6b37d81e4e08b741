"""What prefill tells decode: TensorRT-LLM's DisaggregatedParams as a note, and back.

Handles to a process's memory don't travel: decode makes positions of its own, and needs no
embedding. The KV cache itself goes by the engine's own transceiver.
"""

from __future__ import annotations

import base64
import binascii
from typing import Any

import msgspec
from msgspec import Struct

from triptych.engines.trtllm.api import TrtApi
from triptych.errors import EngineFailed, TicketLost


class TrtKvNote(Struct, frozen=True, forbid_unknown_fields=True):
    """The fields of DisaggregatedParams that decode needs; those that prefill left out are None."""

    version: str  # of TensorRT-LLM
    first_gen_tokens: list[int]
    opaque_state: str | None = None  # base64
    ctx_request_id: int | None = None
    disagg_request_id: int | None = None
    draft_tokens: list[int] | None = None
    ctx_dp_rank: int | None = None
    ctx_info_endpoint: str | list[str] | None = None
    # of each first token: [id, log-probability, rank] of the best ones and its own
    first_gen_log_probs: list[list[tuple[int, float, int | None]]] | None = None


LOWEST_LOGPROB = -3.4e38  # JSON has no infinity
PLAIN_FIELDS = (
    "ctx_request_id",
    "disagg_request_id",
    "draft_tokens",
    "ctx_dp_rank",
    "ctx_info_endpoint",
)


def pack_kv_note(api: TrtApi, params: Any) -> dict[str, Any]:
    if params is None or not params.first_gen_tokens:
        raise EngineFailed("TensorRT-LLM's prefill gave nothing to go on with")
    state = params.opaque_state
    given = getattr(params, "first_gen_log_probs", None)
    handover = TrtKvNote(
        version=api.version,
        first_gen_tokens=list(params.first_gen_tokens),
        opaque_state=None if state is None else base64.b64encode(state).decode(),
        first_gen_log_probs=None if given is None else [_rows(entries) for entries in given],
        **{name: getattr(params, name, None) for name in PLAIN_FIELDS},
    )
    note: dict[str, Any] = msgspec.to_builtins(handover)
    return note


def unpack_kv_note(api: TrtApi, note: dict[str, Any]) -> Any:
    """DisaggregatedParams for ``generation_only``."""
    try:
        handover = msgspec.convert(note, TrtKvNote)
        state = handover.opaque_state
        opaque = None if state is None else base64.b64decode(state, validate=True)
    except (msgspec.ValidationError, binascii.Error) as error:
        raise TicketLost(f"what prefill handed over can't be read: {error}") from None
    if handover.version != api.version:
        raise EngineFailed(
            f"prefill runs TensorRT-LLM {handover.version} and decode {api.version}: "
            "they must be the same"
        )
    # An older version has fewer fields, and is given none that it did not fill.
    fields = {
        name: value for name in PLAIN_FIELDS if (value := getattr(handover, name)) is not None
    }
    if handover.first_gen_log_probs is not None:
        fields["first_gen_log_probs"] = [
            {id: api.logprob(logprob=value, rank=rank) for id, value, rank in rows}
            for rows in handover.first_gen_log_probs
        ]
    return api.disaggregated(
        request_type="generation_only",
        first_gen_tokens=handover.first_gen_tokens,
        opaque_state=opaque,
        **fields,
    )


def _rows(entries: Any) -> list[tuple[int, float, int | None]]:
    return [
        (id, max(LOWEST_LOGPROB, float(entry.logprob)), entry.rank) for id, entry in entries.items()
    ]
