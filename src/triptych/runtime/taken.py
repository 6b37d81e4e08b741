"""Whether a worker's id is taken: by one that lives, here or on another host.

One that died here may be replaced before its lease ends; of one elsewhere, the end of its lease
alone tells that it died. What to do about it is said by whoever wanted the id.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from contextlib import aclosing

from triptych.messages import WorkerRecord
from triptych.observe.progress import print_status
from triptych.runtime.discovery import Discovery
from triptych.runtime.host import here, lives, name
from triptych.runtime.lease import LEASE_SECONDS

WAIT_LEASES = 1.5  # for a worker of another host that may be dead


async def taken(
    discovery: Discovery, ids: Collection[str], *, unsigned: bool = False
) -> WorkerRecord | None:
    """A worker that lives and has one of these ids; None: they are free.

    A record that this cluster has not signed takes no id, and is warned of: anyone who can write to
    discovery can make one. ``unsigned``: it does, if its process lives on this host.
    """
    view = await discovery.view()
    known = [view[one] for one in ids if one in view]
    foreign = [discovery.rejected[one] for one in ids if one in discovery.rejected]
    for other in known + (foreign if unsigned else []):
        if other.host == here() and lives(other):
            return other
    for other in foreign:
        print_status(
            f"  warning: {discovery.standing.setting} holds a record of worker {other.id} that is "
            f"not signed with this TRIPTYCH_SECRET (process {other.pid}): it is ignored"
        )
    far = {other.id: other for other in known if other.host != here()}
    if not far:
        return None
    for other in far.values():
        place = name(other.host)
        print_status(f"worker {other.id} is known on {place}: waiting whether its lease runs out")
    return await _left(discovery, far)


def told(other: WorkerRecord) -> str:
    """Who it is, for people."""
    if other.host == here():
        return f"worker {other.id} is there already (process {other.pid})"
    place = f"on {name(other.host)} ({other.address}, process {other.pid})"
    return f"worker {other.id} is there already, {place}"


async def _left(discovery: Discovery, far: dict[str, WorkerRecord]) -> WorkerRecord | None:
    """One of these whose lease does not run out while we look."""
    left = list(far.values())
    try:
        async with (
            asyncio.timeout(WAIT_LEASES * LEASE_SECONDS),
            aclosing(discovery.watch()) as views,
        ):
            async for view in views:
                left = [other for other in left if other.id in view]
                if not left:
                    break
    except TimeoutError:
        pass
    return left[0] if left else None
