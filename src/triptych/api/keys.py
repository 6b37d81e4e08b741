"""API keys: who may ask, and whose a request is. Admin keys: who may look at the whole server.

A tenant is a digest of its key, so that nothing that travels or is kept can be used as a key.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Sequence

from triptych.errors import Forbidden, InvalidAPIKey


class APIKeys:
    """The keys that a server takes; without API keys everyone may ask, as one tenant.

    An admin key is a tenant of its own, and opens what tells of all tenants.
    """

    def __init__(self, keys: Sequence[str], admin_keys: Sequence[str] = ()) -> None:
        self.demanded = bool(keys)  # from whoever asks
        self._tenants = _digests([*keys, *admin_keys])
        self._admins = frozenset(_digests(admin_keys).values())

    def tenant(self, authorization: bytes) -> str:
        """Whose the key in this header is. Takes as long for a wrong key as for any right one."""
        if not self.demanded:
            return ""
        found = self._find(authorization)
        if not found:
            raise InvalidAPIKey(
                "The API key is missing or wrong. Send it as 'Authorization: Bearer KEY'."
            )
        return found

    def check_admin(self, authorization: bytes) -> None:
        """Refuse whoever may not see the whole server. Without any keys everyone may."""
        if not self._tenants:
            return
        found = self._find(authorization)
        if not found:
            raise InvalidAPIKey(
                "This path needs the server's admin key. Send it as 'Authorization: Bearer KEY'."
            )
        if found not in self._admins:
            raise Forbidden(
                "This path tells of the whole server and needs its admin key, not an API key. The "
                "operator sets one with TRIPTYCH_ADMIN_KEY or --admin-key-file."
            )

    def _find(self, authorization: bytes) -> str:
        """The tenant of the key in a header; empty: it is none of ours."""
        scheme, _, given = authorization.partition(b" ")
        given, found = given.strip(), ""
        for key, tenant in self._tenants.items():
            if hmac.compare_digest(given, key):
                found = tenant
        return found if scheme.lower() == b"bearer" else ""


def _digests(keys: Sequence[str]) -> dict[bytes, str]:
    """The tenant of each key."""
    return {k.encode(): hashlib.sha256(b"tenant\0" + k.encode()).hexdigest() for k in keys}
