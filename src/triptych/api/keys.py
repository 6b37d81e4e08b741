"""API keys and admin keys: who may call a route, and which tenant a request belongs to.

A tenant is a digest of its key, so that nothing that is sent or stored can be used as a key.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Sequence

from triptych.errors import Forbidden, InvalidAPIKey


class APIKeys:
    """The keys of a server. Without API keys everyone may call it, as one tenant.

    An admin key is a tenant of its own, and may call the routes that show all tenants.
    """

    def __init__(self, keys: Sequence[str], admin_keys: Sequence[str] = ()) -> None:
        self._required = bool(keys)
        self._tenants = _digests([*keys, *admin_keys])
        self._admins = frozenset(_digests(admin_keys).values())

    def tenant(self, authorization: bytes) -> str:
        """The tenant of the key in this header. A wrong key takes as long as a right one."""
        if not self._required:
            return ""
        found = self._find(authorization)
        if not found:
            raise InvalidAPIKey(
                "The API key is missing or wrong. Send it as 'Authorization: Bearer KEY'."
            )
        return found

    def check_admin(self, authorization: bytes) -> None:
        """Refuse all keys but admin keys. Without any keys everyone may call."""
        if not self._tenants:
            return
        found = self._find(authorization)
        if not found:
            raise InvalidAPIKey(
                "This path needs the server's admin key. Send it as 'Authorization: Bearer KEY'."
            )
        if found not in self._admins:
            raise Forbidden(
                "This path shows the whole server and needs its admin key, not an API key. The "
                "operator sets one with TRIPTYCH_ADMIN_KEY or --admin-key-file."
            )

    def _find(self, authorization: bytes) -> str:
        """The tenant of the key in a header; empty if the key is unknown."""
        scheme, _, given = authorization.partition(b" ")
        given, found = given.strip(), ""
        for key, tenant in self._tenants.items():
            if hmac.compare_digest(given, key):
                found = tenant
        return found if scheme.lower() == b"bearer" else ""


def _digests(keys: Sequence[str]) -> dict[bytes, str]:
    """The tenant of each key."""
    return {k.encode(): hashlib.sha256(b"tenant\0" + k.encode()).hexdigest() for k in keys}
