"""Cross-origin requests of browsers (``--cors-origins``): which origins may read answers.

Clients identify themselves with keys in headers, never with cookies, so no answer permits
credentials.
"""

from __future__ import annotations

import re

from triptych.config import Config
from triptych.errors import InvalidConfig
from triptych.http.parser import RequestHead

PREFLIGHT_SECONDS = 600  # that a browser may remember the answer to a preflight request
EXPOSED = (  # headers that a page may read, besides those that every page may
    "x-request-id, retry-after, server-timing, x-triptych-ignored-parameters, "
    "x-ratelimit-limit-requests, x-ratelimit-remaining-requests, x-ratelimit-reset-requests, "
    "x-ratelimit-limit-tokens, x-ratelimit-remaining-tokens, x-ratelimit-reset-tokens"
)
# The star stands for all but authorization: clients send headers of their own.
ALLOWED_HEADERS = "authorization, content-type, x-api-key, *"
_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://[a-z0-9.:\[\]_-]+")
_ORIGIN_VARIES = b"vary: origin\r\n"


class CorsPolicy:
    def __init__(self, origins: tuple[str, ...]) -> None:
        self._any = origins == ("*",)
        exposed = f"access-control-expose-headers: {EXPOSED}\r\n"
        vary = "" if self._any else _ORIGIN_VARIES.decode()
        self._headers = {
            origin.encode(): f"access-control-allow-origin: {origin}\r\n{exposed}{vary}".encode()
            for origin in origins
        }

    def headers(self, head: RequestHead) -> bytes:
        """The headers of any response to this request."""
        if self._any:
            return self._headers[b"*"]
        return self._headers.get(head.headers.get(b"origin", b""), _ORIGIN_VARIES)


def is_preflight(head: RequestHead) -> bool:
    """Whether a browser asks if it may send a request. It sends no key with that question."""
    return (
        head.method == "OPTIONS"
        and b"origin" in head.headers
        and b"access-control-request-method" in head.headers
    )


def preflight_headers(methods: str) -> bytes:
    return (
        f"access-control-allow-methods: {methods}\r\n"
        f"access-control-allow-headers: {ALLOWED_HEADERS}\r\n"
        f"access-control-max-age: {PREFLIGHT_SECONDS}\r\n"
    ).encode()


def cors_policy(config: Config) -> CorsPolicy | None:
    """The policy of the config; None: pages of other origins cannot read answers."""
    origins = tuple(o for part in config.cors_origins.split(",") if (o := part.strip()))
    if not origins:
        return None
    if "*" in origins and len(origins) > 1:
        raise InvalidConfig("--cors-origins has '*' beside other origins: give '*' alone or none")
    for origin in origins:
        if origin != "*" and not _ORIGIN.fullmatch(origin):
            raise InvalidConfig(
                f"--cors-origins '{origin}' is not an origin as browsers send it. Write it in "
                "lower case and without a path, as in https://chat.example.com or "
                "http://localhost:3000."
            )
    return CorsPolicy(origins)
