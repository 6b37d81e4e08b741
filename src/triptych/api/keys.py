"""API keys and admin keys: who may call a route, and which tenant a request belongs to.

A tenant is a digest of its key, so that nothing that is sent or stored can be used as a key. Keys
of ``--keys-file`` have names: their tenant is a digest of the name, and outlives the key.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import logging
import time
from collections.abc import Mapping, Sequence

from msgspec import Struct

from triptych.api.key_file import NamedKey, read_key_file
from triptych.api.rate_limits import KeyLimits, KeyQuota
from triptych.errors import Forbidden, InvalidAPIKey, InvalidConfig
from triptych.runtime.file_watch import FileWatch

log = logging.getLogger(__name__)
HOW_TO_SEND = "Send it as 'Authorization: Bearer KEY' or 'x-api-key: KEY'."
NAME_DIGITS = 8  # of the tenant, in the name of a key that has none
NO_LIMITS = KeyLimits()


class KeyHolder(Struct, frozen=True):
    """Whom a key belongs to."""

    name: str  # for the log
    tenant: str
    quota: KeyQuota | None = None  # None: no limits
    admin: bool = False


class _ListedKey(Struct, frozen=True):
    holder: KeyHolder
    expires: float | None = None  # Unix time


NOBODY = KeyHolder("", "")  # where no key is needed


class APIKeys:
    """The keys of a server. Without API keys everyone may call it, as one tenant.

    An admin key is a tenant of its own, and may call the routes that show all tenants. ``file``
    has further API keys; it is read again when it changes.
    """

    def __init__(self, keys: Sequence[str], admin_keys: Sequence[str] = (), file: str = "") -> None:
        self._required = bool(keys or file)
        self._plain = _entries(keys, admin=False) | _entries(admin_keys, admin=True)
        self._by_digest = self._plain
        self._quotas: dict[str, KeyQuota] = {}  # by name: they outlive a reload
        self._file = file
        self.watch = FileWatch((file,), self._reload) if file else None
        if file:
            self._use(read_key_file(file))

    def identify(self, headers: Mapping[bytes, bytes]) -> KeyHolder:
        """The holder of the key in these headers. A wrong key takes as long as a right one."""
        if not self._required:
            return NOBODY
        found = self._find(headers)
        if found is None:
            raise InvalidAPIKey(f"The API key is missing or wrong. {HOW_TO_SEND}")
        return found

    def identify_public(self, headers: Mapping[bytes, bytes]) -> KeyHolder:
        """The same on a path that needs no key: without a valid one it is nobody's request."""
        try:
            found = self._find(headers) if self._required else None
        except InvalidAPIKey:
            found = None
        return found or NOBODY

    def check_admin(self, headers: Mapping[bytes, bytes]) -> KeyHolder:
        """Refuse all keys but admin keys. Without any keys everyone may call."""
        if not self._by_digest:
            return NOBODY
        found = self._find(headers)
        if found is None:
            raise InvalidAPIKey(f"This path needs the server's admin key. {HOW_TO_SEND}")
        if not found.admin:
            raise Forbidden(
                "This path shows the whole server and needs its admin key, not an API key. The "
                "operator sets one with TRIPTYCH_ADMIN_KEY or --admin-key-file."
            )
        return found

    def _find(self, headers: Mapping[bytes, bytes]) -> KeyHolder | None:
        """The holder of the key in these headers; None if the key is missing or unknown. Raises
        InvalidAPIKey if it has expired."""
        given, found = hashlib.sha256(_given_key(headers)).digest(), None
        for digest, entry in self._by_digest.items():
            if hmac.compare_digest(given, digest):
                found = entry
        if found is None:
            return None
        if found.expires is not None and found.expires <= time.time():
            raise InvalidAPIKey("The API key has expired. Ask the operator for a new one.")
        return found.holder

    async def _reload(self) -> None:
        try:
            self._use(await asyncio.to_thread(read_key_file, self._file))
        except InvalidConfig as error:
            log.error("the changed keys are not used, the old ones stay: %s", error)
        else:
            log.info("the keys in %s were read again", self._file)

    def _use(self, keys: Sequence[NamedKey]) -> None:
        """Use these keys from now on. What a name has used of its limits stays used."""
        self._check(keys)  # all of them, before any limit changes
        entries = dict(self._plain)
        holders: dict[str, KeyHolder] = {}
        for key in keys:
            if key.name not in holders:
                holders[key.name] = KeyHolder(
                    key.name, _digest("named", key.name), self._quota(key)
                )
            entries[key.digest] = _ListedKey(holders[key.name], key.expires)
        self._by_digest = entries
        self._quotas = {name: q for name, q in self._quotas.items() if name in holders}

    def _check(self, keys: Sequence[NamedKey]) -> None:
        for key in keys:
            if key.digest in self._plain:
                raise InvalidConfig(
                    f"the key of '{key.name}' in --keys-file is also an API key or an admin key "
                    "without a name: use it in one place"
                )

    def _quota(self, key: NamedKey) -> KeyQuota | None:
        quota = self._quotas.get(key.name)
        if quota is not None:
            quota.change(key.limits)
        elif key.limits != NO_LIMITS:
            quota = self._quotas[key.name] = KeyQuota(key.limits)
        return quota


def _given_key(headers: Mapping[bytes, bytes]) -> bytes:
    """The key that a client sent; empty if there is none."""
    authorization = headers.get(b"authorization")
    if authorization is None:
        return headers.get(b"x-api-key", b"").strip()
    scheme, _, given = authorization.partition(b" ")
    return given.strip() if scheme.lower() == b"bearer" else b""


def _entries(keys: Sequence[str], *, admin: bool) -> dict[bytes, _ListedKey]:
    """Keys without names, by their digests."""
    found = {}
    for key in keys:
        tenant = _digest("tenant", key)
        name = f"{'admin' if admin else 'key'}-{tenant[:NAME_DIGITS]}"
        digest = hashlib.sha256(key.encode()).digest()
        found[digest] = _ListedKey(KeyHolder(name, tenant, admin=admin))
    return found


def _digest(what: str, value: str) -> str:
    return hashlib.sha256(f"{what}\0{value}".encode()).hexdigest()
