"""Files that were fetched, kept for the next request that names the same URL in the same scope.

A server's word decides: ``Cache-Control`` says whether a file may be kept at all and for how long
it is good unasked (five minutes at most); after that its validators are sent along, and the file is
taken from here only if the server says that it has not changed. Scopes (tenants, salts) share
nothing. The least recently used goes first. No network here.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Mapping

from msgspec import Struct

from triptych.runtime.caching import LRUCache

MAX_FRESH_SECONDS = 300.0  # seconds
ENTRY_OVERHEAD = 1024  # bytes that each file is counted for besides its own and those of its words
_VALIDATOR = re.compile(r"[ -~]{0,1024}")  # what can be sent back as it came
_SECONDS = re.compile(r'"?([0-9]{1,10})"?')


class FetchedFile(Struct, frozen=True):
    """A file, and what is needed to ask whether it has changed."""

    data: bytes | memoryview
    url: str  # that gave it, after redirects: only there its validators mean something
    etag: str = ""
    modified: str = ""
    fresh_until: float = 0.0  # by the cache's clock

    def conditions(self) -> dict[str, str]:
        """The headers that ask for the file only if it is another by now."""
        if self.etag:
            return {"If-None-Match": self.etag}
        return {"If-Modified-Since": self.modified} if self.modified else {}


class FetchCache:
    def __init__(self, limit_bytes: int, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self.files: LRUCache[tuple[str, str], FetchedFile] = LRUCache(
            limit_bytes
        )  # by scope and URL

    def find(self, scope: str, url: str) -> FetchedFile | None:
        """What was kept, fresh or not."""
        return self.files.get((scope, url))

    def is_fresh(self, file: FetchedFile) -> bool:
        return self._clock() < file.fresh_until

    def keep(
        self, scope: str, url: str, data: bytes | memoryview, final: str, headers: Mapping[str, str]
    ) -> None:
        """Keep a file that ``url`` led to, as far as the headers of ``final`` permit."""
        self.files.remove((scope, url))
        rules = _rules(headers.get("cache-control", ""))
        etag, modified = headers.get("etag", ""), headers.get("last-modified", "")
        if not all(_VALIDATOR.fullmatch(text) for text in (etag, modified)):
            return
        # how long a redirect itself holds is another question: then the server is always asked
        fresh = _fresh_seconds(rules, headers.get("age", "")) if url == final else 0.0
        if "no-store" in rules or "*" in headers.get("vary", ""):
            return
        if not (etag or modified or fresh):
            return  # it could never be used
        file = FetchedFile(data, final, etag, modified, self._clock() + fresh)
        # A hostile server makes these long.
        words = 4 * len(scope) + len(url) + len(final) + len(etag) + len(modified)
        self.files.put((scope, url), file, len(data) + words + ENTRY_OVERHEAD)


def _rules(text: str) -> dict[str, str]:
    pairs = (word.partition("=") for word in text.lower().split(","))
    return {name.strip(): value.strip() for name, _, value in pairs}


def _fresh_seconds(rules: Mapping[str, str], age: str) -> float:
    found = _SECONDS.fullmatch(rules.get("max-age", ""))
    if found is None or "no-cache" in rules:
        return 0.0
    spent = _SECONDS.fullmatch(age.strip())
    return max(0.0, min(MAX_FRESH_SECONDS, float(found[1]) - (float(spent[1]) if spent else 0.0)))
