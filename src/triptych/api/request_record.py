"""What a request has used: for the limits of its key, and for the access log.

Requests have a record only where one of the two is on.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence

from msgspec import UNSET

from triptych.api.rate_limits import KeyQuota
from triptych.api.stream import BufferedChoice
from triptych.http.exchange import HTTPExchange
from triptych.observe.access_log import AccessEntry, printable_path


class RequestRecord:
    __slots__ = (
        "_first_token",
        "choices",
        "error",
        "key",
        "media_bytes",
        "n",
        "quota",
        "seconds",
    )

    def __init__(self, key: str = "", quota: KeyQuota | None = None) -> None:
        self.key = key  # its name
        self.quota = quota
        self.n = 1  # choices of each prompt
        self.choices: Sequence[BufferedChoice] = ()  # once they run
        self.seconds: Mapping[str, float] = {}  # by stage
        self.media_bytes = 0
        self.error = ""  # the code
        self._first_token = 0.0

    def check_media(self) -> None:
        """Refuse media that the limits do not admit."""
        if self.quota is not None:
            self.quota.check_media()

    def count_media(self, amount: int) -> None:
        self.media_bytes += amount
        if self.quota is not None:
            self.quota.count_media(amount)

    def run(self, choices: Sequence[BufferedChoice]) -> None:
        """These choices run from now on."""
        self.choices = choices
        for choice in choices:
            choice.on_first_token = self._before(choice.on_first_token)

    def _before(self, then: Callable[[], None] | None) -> Callable[[], None]:
        def first_token() -> None:
            if not self._first_token:
                self._first_token = time.monotonic()
            if then is not None:
                then()

        return first_token

    @property
    def prompt_tokens(self) -> int:
        return sum(c.prompt.tokens for c in self._prompts() if c.prompt is not None)

    @property
    def output_tokens(self) -> int:
        return sum(choice.count for choice in self.choices)

    def tokens_used(self, *, left: bool) -> int:
        """For the limits of the key. ``left``: its client left before the answer was complete.
        Then prompts count that no worker has reported, or leaving early would make them free."""
        used = self.prompt_tokens + self.output_tokens
        if left:
            used += sum(
                len(choice.work.prompt)
                for choice in self.choices
                if choice.index % self.n == 0 and choice.prompt is None
            )
        return used

    def _prompts(self) -> list[BufferedChoice]:
        """One choice of each prompt that a worker has begun."""
        return [c for c in self.choices if c.index % self.n == 0 and c.prompt is not None]

    def entry(self, exchange: HTTPExchange) -> AccessEntry:
        """The line of the access log, when the request has ended."""
        prompts, first = self._prompts(), self._first_token
        stages = {stage: round(s * 1e3, 3) for stage, s in self.seconds.items()}
        return AccessEntry(
            time=time.time(),
            request_id=exchange.id,
            key=self.key,
            method=exchange.head.method,
            path=printable_path(exchange.head.path),
            status=exchange.status,
            ms=round((time.monotonic() - exchange.received) * 1e3, 3),
            first_token_ms=round((first - exchange.received) * 1e3, 3) if first else UNSET,
            prompt_tokens=self.prompt_tokens if prompts else UNSET,
            cached_tokens=sum(c.prompt.cached for c in prompts if c.prompt) if prompts else UNSET,
            media_tokens=_media_tokens(prompts) or UNSET,
            output_tokens=self.output_tokens if self.choices else UNSET,
            media_bytes=self.media_bytes or UNSET,
            stages_ms=stages or UNSET,
            error=self.error or UNSET,
        )


def record_of(exchange: HTTPExchange) -> RequestRecord | None:
    """The record of a request, which ``App.check_head`` made; None: it needs none."""
    record = exchange.head.record
    assert record is None or isinstance(record, RequestRecord)
    return record


def _media_tokens(choices: Sequence[BufferedChoice]) -> dict[str, int]:
    """Prompt tokens of media by kind, where the engine reports them."""
    found: dict[str, int] = {}
    for choice in choices:
        spans = () if choice.prompt is None else choice.prompt.media
        for item, span in zip(choice.work.media, spans, strict=False):
            found[item.kind] = found.get(item.kind, 0) + span.length
    return found
