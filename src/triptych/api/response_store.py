"""Answers of /v1/responses that later requests continue, with the turns of their chats.

In memory, for a while after their last use. They belong to a tenant (an API key): another tenant's
id is unknown. An entry has the turns of its own request and answer, and names the one before it.
"""

from __future__ import annotations

import re
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence

import msgspec
from msgspec import Struct

from triptych.api.response_objects import ResponseObject
from triptych.api.responses import encode
from triptych.errors import ResponseNotFound
from triptych.prompt.processor import ChatTurn, MediaPart

ENTRY_OVERHEAD = 2048  # bytes that an entry counts for besides its turns
TURN_OVERHEAD = 256
_TURN = re.compile(r"messages\[(\d+)\]")


class StoredResponse(Struct, frozen=True):
    response: ResponseObject
    turns: tuple[ChatTurn, ...]  # of its request, without the instructions, and of its answer


class _ResponseEntry(Struct, frozen=True):
    tenant: str
    stored: StoredResponse
    size: int
    used: float  # when it was used last, by the monotonic clock


class ResponseStore:
    """The stored responses of one frontend, least recently used first: these are evicted.

    ``max_entries`` and ``limit_bytes`` bound all together, ``share`` the bytes of one tenant.
    """

    def __init__(
        self,
        max_entries: int,
        limit_bytes: int,
        seconds: float,
        *,
        share: int | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._max_entries = max_entries
        self._limit = limit_bytes
        self._share = limit_bytes if share is None else min(share, limit_bytes)
        self._seconds = seconds
        self._clock = clock
        self._held: Counter[str] = Counter()  # bytes by tenant
        self._entries: dict[str, _ResponseEntry] = {}

    @property
    def enabled(self) -> bool:
        return bool(self._max_entries and self._limit)

    @property
    def held(self) -> int:
        """Bytes, of all tenants."""
        return self._held.total()

    def put(self, tenant: str, stored: StoredResponse) -> None:
        """Store it, and evict others where there is no room. One that can't fit is not stored."""
        size = ENTRY_OVERHEAD + len(encode(stored.response)) + sum(map(_turn_size, stored.turns))
        if not self.enabled or size > self._share:
            return
        self._forget_expired()
        id = stored.response.id
        self._entries[id] = _ResponseEntry(tenant, stored, size, self._clock())
        self._held[tenant] += size
        while self._held[tenant] > self._share:
            self._remove(next(i for i, entry in self._entries.items() if entry.tenant == tenant))
        while self.held > self._limit or len(self._entries) > self._max_entries:
            self._remove(next(iter(self._entries)))

    def get(self, tenant: str, id: str) -> StoredResponse:
        self._forget_expired()
        entry = self._entries.get(id)
        if entry is None or entry.tenant != tenant:
            raise ResponseNotFound(
                "There is no such response, or it was not used for too long, or others took its "
                "place. Send the whole conversation in input."
            )
        return entry.stored

    def conversation(self, tenant: str, id: str) -> tuple[ChatTurn, ...]:
        """All turns up to this response.

        A response counts as used before those that it continues: the last of a conversation is
        evicted first, so that the others can still be continued.
        """
        chain: list[StoredResponse] = []
        at: str | None = id
        while at is not None:
            chain.append(self.get(tenant, at))
            at = chain[-1].response.previous_response_id
        now = self._clock()
        for stored in chain:
            entry = self._entries.pop(stored.response.id)
            self._entries[stored.response.id] = msgspec.structs.replace(entry, used=now)
        return tuple(turn for stored in reversed(chain) for turn in stored.turns)

    def _forget_expired(self) -> None:
        limit = self._clock() - self._seconds
        while self._entries:
            oldest = next(iter(self._entries))
            if self._entries[oldest].used > limit:
                return
            self._remove(oldest)

    def _remove(self, id: str) -> None:
        entry = self._entries.pop(id)
        self._held[entry.tenant] -= entry.size

    def __len__(self) -> int:
        self._forget_expired()
        return len(self._entries)


class EarlierTurns:
    """The turns of one request: those of earlier responses, and its own."""

    def __init__(self, earlier: tuple[ChatTurn, ...], *, instructed: bool) -> None:
        self._earlier = earlier
        self.own: tuple[ChatTurn, ...] = ()  # without the instructions
        self._first = int(instructed)  # where the earlier ones are inserted
        self._joined = False

    def join(self, turns: Sequence[ChatTurn]) -> tuple[ChatTurn, ...]:
        """All turns. The instructions come first: each request has its own."""
        self._joined = True
        self.own = tuple(turns[self._first :])
        return (*turns[: self._first], *self._earlier, *self.own)

    def place(self, param: str | None) -> str | None:
        """The parameter of the chat's own messages. Before ``join``, it is that already."""
        match = _TURN.match(param or "")
        if match is None or param is None or not self._joined or not self._earlier:
            return param
        turn = int(match[1])
        if turn < self._first:
            return param
        own = turn - len(self._earlier)
        if own < self._first:
            return "previous_response_id"
        return f"messages[{own}]{param[match.end() :]}"


def called_functions(turns: Iterable[ChatTurn]) -> dict[str, str]:
    """The functions that the assistant has called, by the id of the call."""
    return {call.id: call.name for turn in turns if turn.details for call in turn.details.calls}


def _turn_size(turn: ChatTurn) -> int:
    size = TURN_OVERHEAD
    if turn.details is not None:
        size += sum(map(sys.getsizeof, turn.details.strings()))
    if isinstance(turn.content, str):
        return size + sys.getsizeof(turn.content)
    for part in turn.content:
        size += TURN_OVERHEAD
        if not isinstance(part, MediaPart):
            size += sys.getsizeof(part.text)
        elif part.source is not None:
            size += len(part.source)
    return size
