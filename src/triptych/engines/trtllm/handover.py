"""The note from prefill to decode: TensorRT-LLM's DisaggregatedParams as JSON, and back.

Handles of a process's memory are left out: decode computes positions itself and needs no embedding.
TensorRT-LLM's own transceiver moves the KV cache.
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
    """The fields of DisaggregatedParams that decode needs; None: prefill did not set it."""

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
        raise EngineFailed("TensorRT-LLM prefilled a prompt, but returned no first token")
    state = params.opaque_state
    given = getattr(params, "first_gen_log_probs", None)
    note = TrtKvNote(
        version=api.version,
        first_gen_tokens=list(params.first_gen_tokens),
        opaque_state=None if state is None else base64.b64encode(state).decode(),
        first_gen_log_probs=None if given is None else [_rows(entries) for entries in given],
        **{name: getattr(params, name, None) for name in PLAIN_FIELDS},
    )
    fields: dict[str, Any] = msgspec.to_builtins(note)
    return fields


def unpack_kv_note(api: TrtApi, note: dict[str, Any]) -> Any:
    """DisaggregatedParams for ``generation_only``."""
    try:
        handover = msgspec.convert(note, TrtKvNote)
        state = handover.opaque_state
        opaque = None if state is None else base64.b64decode(state, validate=True)
    except (msgspec.ValidationError, binascii.Error) as error:
        raise TicketLost(f"prefill handed over an invalid note: {error}") from None
    if handover.version != api.version:
        raise EngineFailed(
            f"prefill runs TensorRT-LLM {handover.version} and decode runs {api.version}: "
            "install the same version"
        )
    # An older version has fewer fields, so those that it did not set are left out.
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
