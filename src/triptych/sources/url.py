"""Parses the URL of a media file so strictly that no two parsers can read it differently.

Attacks on fetchers use differences between parsers: what is the host to one is a user name to the
other. So anything unusual is refused here first, and then two independent parsers must find the
same host.
"""

from __future__ import annotations

import re
import unicodedata
from ipaddress import AddressValueError, IPv4Address, IPv6Address
from urllib.parse import urlsplit

import idna
import yarl
from msgspec import Struct

from triptych.errors import InvalidConfig, MediaURLBlocked, UnsupportedURLScheme

MAX_URL_CHARACTERS = 8192  # characters
_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*):")
_AUTHORITY = re.compile(r"(?i:https?)://([^/?#]*)")
_HOST_PORT = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[^\[\]:@%]+)(?::([0-9]{1,5}))?")
_NAME = re.compile(r"(?=.{1,253}\Z)[a-z0-9_-]{1,63}(?:\.[a-z0-9_-]{1,63})*")
_NUMBER = re.compile(r"[0-9]+|0x[0-9a-f]*")


class ParsedURL(Struct, frozen=True):
    """A URL, and its host in the form in which hosts are compared."""

    url: yarl.URL  # without its fragment
    host: str  # ASCII, lower case, without a final dot and without brackets
    secure: bool

    @property
    def is_address(self) -> bool:
        return ":" in self.host or bool(_NUMBER.fullmatch(self.host.rpartition(".")[2]))


def url_blocked(why: str) -> MediaURLBlocked:
    return MediaURLBlocked(f"The media URL is not followed: {why}.")


def network_blocked() -> MediaURLBlocked:
    return url_blocked(
        "its host is in a network that is closed to media. A server that was started with "
        "--allow-private-media reaches private and loopback addresses, never link-local ones"
    )


def parse_url(text: str) -> ParsedURL:
    """Raises UnsupportedURLScheme or MediaURLBlocked."""
    if len(text) > MAX_URL_CHARACTERS:
        raise url_blocked(f"it has over {MAX_URL_CHARACTERS} characters")
    scheme = _SCHEME.match(text)
    if not scheme or scheme[1].lower() not in ("http", "https"):
        raise UnsupportedURLScheme("Media are fetched by http and https only.")
    if "\\" in text or any(unicodedata.category(sign)[0] in "CZ" for sign in text):
        raise url_blocked("it holds a backslash, a space or a control character")
    found = _AUTHORITY.match(text)
    parts = _HOST_PORT.fullmatch(found[1]) if found else None
    if found is None or parts is None:
        raise url_blocked(
            "it must read http://host/path, without user name, and the host unescaped"
        )
    host, port = _host(parts[1]), parts[2]
    if port is not None and not 1 <= int(port) <= 65535:
        raise url_blocked("its port is out of range")
    written = host if host[0] == "[" or not parts[1].endswith(".") else host + "."
    rest = text[found.end() :].partition("#")[0]
    return _agreed(scheme[1].lower(), written, port, rest)


def resolve_redirect(base: ParsedURL, location: str) -> ParsedURL:
    """The target of a redirect: a whole URL, or a path on the same host."""
    if _SCHEME.match(location):
        return parse_url(location)
    origin = str(base.url.origin())
    if location.startswith("//"):
        return parse_url(f"{base.url.scheme}:{location}")
    if location.startswith("/"):
        return parse_url(origin + location)
    if location.startswith(("?", "#")):
        return parse_url(origin + base.url.raw_path + location)
    return parse_url(origin + base.url.raw_path.rpartition("/")[0] + "/" + location)


def _host(text: str) -> str:
    """The host in ASCII, without a dot at its end; an IPv6 address in brackets."""
    if text.startswith("["):
        try:
            return f"[{IPv6Address(text[1:-1])}]"
        except AddressValueError:
            raise url_blocked("its host is not a valid IPv6 address") from None
    try:
        host = text if text.isascii() else idna.encode(text, uts46=True).decode()
    except idna.IDNAError:
        raise url_blocked("its host is not a valid name") from None
    host = host.lower().removesuffix(".")
    if not _NAME.fullmatch(host):
        raise url_blocked("its host is not a valid name")
    if _NUMBER.fullmatch(host.rpartition(".")[2]):  # other parsers take 127.1 for an address
        try:
            IPv4Address(host)
        except AddressValueError:
            raise url_blocked(
                "its host is an address that is not written as four numbers"
            ) from None
    return host


def _agreed(scheme: str, host: str, port: str | None, rest: str) -> ParsedURL:
    authority = host if port is None else f"{host}:{port}"
    text = f"{scheme}://{authority}{rest if rest.startswith('/') else '/' + rest}"
    bare = host.strip("[]")
    number = int(port) if port else {"http": 80, "https": 443}[scheme]
    try:
        theirs = yarl.URL(text)
        pair = urlsplit(text)
        seen = {(theirs.scheme, theirs.raw_host, theirs.port)}
        seen.add((pair.scheme, pair.hostname, pair.port or number))
    except ValueError:
        raise url_blocked("it cannot be read") from None
    if seen != {(scheme, bare, number)} or theirs.raw_user or theirs.raw_password:
        raise url_blocked("it can be read in two ways")
    return ParsedURL(theirs, bare.removesuffix("."), scheme == "https")


class AllowedDomains:
    """The hosts that the operator permits; all, if none are named.

    ``example.com`` permits the host and all below it, ``.example.com`` only those below it. An
    address permits itself.
    """

    def __init__(self, text: str) -> None:
        self._entries = tuple(_entry(word.strip()) for word in text.split(",") if word.strip())

    def permit(self, host: str) -> bool:
        return not self._entries or any(_covers(entry, host) for entry in self._entries)


def _covers(entry: str, host: str) -> bool:
    if entry.startswith("."):
        return host.endswith(entry)
    return host == entry or host.endswith("." + entry)


def _entry(word: str) -> str:
    dot = "." if word.startswith(".") else ""
    name = word[len(dot) :]
    try:
        bare = _host(f"[{name.strip('[]')}]" if ":" in name else name).strip("[]")
    except MediaURLBlocked:
        raise InvalidConfig(
            f"--allowed-media-domains: {word!r} is not a host. Write example.com (with all below "
            "it) or .example.com (only those below it), without scheme or port."
        ) from None
    return dot + bare
