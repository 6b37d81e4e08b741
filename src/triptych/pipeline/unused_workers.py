"""Workers that discovery shows and that this frontend does not use: why not, and what to do."""

from __future__ import annotations

from collections.abc import Collection

from msgspec import Struct

from triptych.errors import WorkerLost
from triptych.host import host_name
from triptych.messages import WorkerRecord
from triptych.runtime.discovery import DiscoveryStatus

NO_WAY = (
    "Is that an address of its host which leads there from here (--worker-host), and is the port "
    "open?"
)
SHOWN = 12  # digits of a fingerprint


class UnusedWorker(Struct, frozen=True):
    """One of them, for people."""

    id: str
    role: str
    host: str
    address: str
    why: str


def incompatible_worker(
    record: WorkerRecord, model: str, roles: Collection[str], standing: DiscoveryStatus
) -> UnusedWorker | None:
    """One that is not ours: of another model, or of a role that the topology lacks."""
    elsewhere = f"give one of the two another {standing.setting.split()[0]}"
    if record.role not in roles:
        why = (
            f"It has the role {record.role}, and this frontend's pattern only {', '.join(roles)}. "
            f"Give both the same --pattern, or {elsewhere}."
        )
    elif record.model != model:
        why = (
            f"It serves another model (fingerprint {record.model[:SHOWN]}) than this frontend "
            f"({model[:SHOWN]}). Give both the same, or {elsewhere}."
        )
    else:
        return None
    return _of(record, why)


def unsigned_worker(record: WorkerRecord, standing: DiscoveryStatus) -> UnusedWorker:
    """One whose record may be anybody's: the address in it is not called."""
    why = (
        "Its record is not signed with this cluster's secret. Give both the same TRIPTYCH_SECRET; "
        f"if they have it, find out who else writes to {standing.place}."
    )
    return _of(record, why)


def unreachable_worker(record: WorkerRecord, error: WorkerLost) -> UnusedWorker:
    """One of ours that we cannot talk to (yet)."""
    no_way = isinstance(error.__cause__, OSError) and not record.address.startswith("nats:")
    return _of(record, f"{error} {NO_WAY}" if no_way else str(error))


def _of(record: WorkerRecord, why: str) -> UnusedWorker:
    return UnusedWorker(record.id, record.role, host_name(record.host), record.address, why)
