"""Workers in discovery that get no requests from this frontend: why not, and what to do."""

from __future__ import annotations

from collections.abc import Collection

from msgspec import Struct

from triptych.errors import WorkerLost
from triptych.host import host_name
from triptych.messages import WorkerRecord
from triptych.runtime.discovery import DiscoveryStatus

CHECK_ADDRESS = (
    "Is that an address of its host which leads there from here (--worker-host), and is the port "
    "open?"
)
SHOWN_DIGITS = 12  # of a fingerprint


class UnusedWorker(Struct, frozen=True):
    """As /cluster shows it."""

    id: str
    role: str
    host: str
    address: str
    why: str


def incompatible_worker(
    record: WorkerRecord, model: str, roles: Collection[str], status: DiscoveryStatus
) -> UnusedWorker | None:
    """A worker of another model, or of a role that the topology lacks. None: it is compatible."""
    elsewhere = f"give one of the two another {status.setting.split()[0]}"
    if record.role not in roles:
        why = (
            f"It has the role {record.role}, and this frontend's pattern only {', '.join(roles)}. "
            f"Give both the same --pattern, or {elsewhere}."
        )
    elif record.model != model:
        why = (
            f"It serves another model (fingerprint {record.model[:SHOWN_DIGITS]}) than this "
            f"frontend ({model[:SHOWN_DIGITS]}). Give both the same, or {elsewhere}."
        )
    else:
        return None
    return _unused(record, why)


def unsigned_worker(record: WorkerRecord, status: DiscoveryStatus) -> UnusedWorker:
    """A worker whose record anyone may have written: its address is not called."""
    why = (
        "Its record is not signed with this cluster's secret. Give both the same TRIPTYCH_SECRET; "
        f"if they have it, find out who else writes to {status.place}."
    )
    return _unused(record, why)


def unreachable_worker(record: WorkerRecord, error: WorkerLost) -> UnusedWorker:
    """A compatible worker that the frontend could not connect to yet."""
    no_route = isinstance(error.__cause__, OSError) and not record.address.startswith("nats:")
    return _unused(record, f"{error} {CHECK_ADDRESS}" if no_route else str(error))


def _unused(record: WorkerRecord, why: str) -> UnusedWorker:
    return UnusedWorker(record.id, record.role, host_name(record.host), record.address, why)
