"""API keys: who may ask, and whose a request is.

A tenant is a digest of its key, so that nothing that travels or is kept can be used as a key.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Sequence

from triptych.errors import InvalidAPIKey


class Keys:
    """The keys that a server takes; none: it takes everyone, as one tenant."""

    def __init__(self, keys: Sequence[str]) -> None:
        self._tenants = [
            (key.encode(), hashlib.sha256(b"tenant\0" + key.encode()).hexdigest()) for key in keys
        ]

    def __len__(self) -> int:
        return len(self._tenants)

    def tenant(self, authorization: bytes) -> str:
        """Whose the key in this header is. Takes as long for a wrong key as for any right one."""
        if not self._tenants:
            return ""
        scheme, _, given = authorization.partition(b" ")
        given = given.strip()
        found = ""
        for key, tenant in self._tenants:
            if hmac.compare_digest(given, key):
                found = tenant
        if not found or scheme.lower() != b"bearer":
            raise InvalidAPIKey(
                "The API key is missing or wrong. Send it as 'Authorization: Bearer KEY'."
            )
        return found
