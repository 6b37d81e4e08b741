"""A client of the chat API that streams one answer: for ``ask``, ``chat`` and ``demo``.

It sends files unchecked and raises the errors of the server. It uses ``http.client``, so that these
commands start without an event loop.
"""

from __future__ import annotations

import base64
import http.client
import re
import socket
import ssl
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, TypeVar
from urllib.parse import urlsplit

import msgspec
from msgspec import Struct

from triptych.config import Config
from triptych.errors import InvalidConfig, ServiceError, StartError, TriptychError, rebuild_error
from triptych.host import join_host_port
from triptych.messages import Failure, MediaKind

T = TypeVar("T")
MessagePart = dict[str, Any]  # one part of a message's content
GREEDY: Mapping[str, Any] = MappingProxyType({"temperature": 0})

CONNECT_SECONDS = 10.0
SILENT_SECONDS = 600.0  # a request may be queued before its first token
_URL = re.compile(r"(https?|file|media|data):", re.IGNORECASE)
_SCHEME = re.compile(r"[a-z][a-z0-9+.-]+://", re.IGNORECASE)  # of any URL
UNKNOWN = "unknown scheme: a URL begins with http:, https:, file:, media: or data:"
SET_KEY = "Set TRIPTYCH_API_KEY, or give --api-key-file."
_LONGEST_NAME = 100  # characters: data: URLs are long
_TIMING = b": server-timing: "
_UNKNOWN_ISSUER = (18, 19, 20, 21)  # OpenSSL's codes: self-signed, or of an unknown authority
_HEALTH_BYTES = 1 << 16  # read of an answer that may be another program's


class MediaInput(Struct, frozen=True):
    """An image, video or audio: a local path, or a URL that the server fetches."""

    kind: MediaKind
    source: str
    flagged: bool = True  # given as --image, --video or --audio

    @property
    def name(self) -> str:
        """The source, shortened, after its flag."""
        source = self.source
        if len(source) > _LONGEST_NAME:
            source = f"{source[:_LONGEST_NAME]}..."
        return f"--{self.kind} {source}" if self.flagged else source

    def part(self) -> MessagePart:
        """The part of a message. Raises StartError if the path is not a file."""
        return {"type": f"{self.kind}_url", f"{self.kind}_url": {"url": self._url()}}

    def _url(self) -> str:
        if is_url(self.source):
            return self.source
        path = Path(self.source).expanduser()
        if path.exists() and not path.is_file():
            raise StartError(f"{self.name}: not a file")
        try:
            data = path.read_bytes()
        except OSError as error:
            why = error.strerror
            if isinstance(error, FileNotFoundError):
                why = UNKNOWN if _SCHEME.match(self.source) else "no such file"
                if self.source == "-":
                    why = "stdin gives only the question: give the name of a file"
            raise StartError(f"{self.name}: {why}") from None
        return f"data:;base64,{base64.b64encode(data).decode()}"


def base_url(config: Config) -> str:
    """Where the server of these settings listens."""
    scheme = "https" if config.tls_cert else "http"
    return f"{scheme}://{join_host_port(config.host, config.port)}"


def is_url(source: str) -> bool:
    """Whether the server fetches this source."""
    return _URL.match(source) is not None


class ChatAnswer(Struct, frozen=True):
    """A whole answer."""

    answer: str
    model: str
    finish: str
    usage: dict[str, Any]
    timings: dict[str, float]  # milliseconds by stage, as the server reports them


class _Error(Struct, frozen=True):
    message: str = ""
    code: str | None = None
    param: str | None = None


class _Delta(Struct, frozen=True):
    content: str | None = None


class _Choice(Struct, frozen=True):
    delta: _Delta = _Delta()
    finish_reason: str | None = None


class _Chunk(Struct, frozen=True):
    choices: tuple[_Choice, ...] = ()
    usage: dict[str, Any] | None = None
    error: _Error | None = None


class _Health(Struct, frozen=True):
    status: Literal["ok", "unready", "draining"]


class _Model(Struct, frozen=True):
    id: str


class _Models(Struct, frozen=True):
    data: tuple[_Model, ...]


class Client:
    """``url``: of a server, with or without ``/v1``. ``certificate``: the file with the server's
    own certificate, which then counts; else an authority must have signed it, for this host."""

    def __init__(self, url: str, key: str = "", certificate: str = "") -> None:
        self.url = url.rstrip("/").removesuffix("/v1")
        parts = urlsplit(self.url)
        try:
            port = parts.port
        except ValueError:
            port = -1
        if parts.scheme not in ("http", "https") or not parts.hostname or port == -1:
            raise InvalidConfig(
                f"'{url}' is not a server's URL. Write it as http://127.0.0.1:8000."
            )
        self._secure = parts.scheme == "https"
        self._certificate = certificate
        self._host, self._port, self._path = parts.hostname, port, parts.path
        self._headers = {"Content-Type": "application/json", "Accept-Encoding": "identity"}
        self._key = {"Authorization": f"Bearer {key}"} if key else {}

    def ready(self) -> bool:
        """False: no Triptych server listens there. Raises ServiceError if one does, but is not
        ready, or if it may be one with TLS. Sends no key, since another program may listen there.
        """
        try:
            with self._reply("GET", "/health", key=False) as reply, self._reading():
                body = reply.read(_HEALTH_BYTES)
            state = msgspec.json.decode(body, type=_Health).status
        except NoHTTP:
            if self._secure:
                return False
            raise ServiceError(
                f"the port of {self.url} is in use, but does not answer plain HTTP. If a server "
                f"with TLS listens there, give --url https{self.url.removeprefix('http')} or its "
                "--tls-cert; else give another --port"
            ) from None
        except (ServerNotFound, msgspec.DecodeError, UnicodeDecodeError):
            return False  # none, or another program on this port
        if reply.status != 200:
            raise ServiceError(f"the server at {self.url} is not ready: {state}")
        return state == "ok"

    def model(self) -> str:
        """The name of the served model."""
        with self._reply("GET", "/v1/models") as reply:
            models = self._decode(self._read_all(self._check_status(reply)), _Models).data
        if not models:
            raise ServiceError(f"the server at {self.url} serves no model")
        return models[0].id

    def ask(
        self,
        question: str,
        media: Sequence[MessagePart],
        max_tokens: int | None = None,
        on_text: Callable[[str], None] = lambda text: None,
    ) -> ChatAnswer:
        """Ask one question with greedy sampling. ``on_text`` gets each piece of text."""
        content = [*media, {"type": "text", "text": question}]
        limit = {} if max_tokens is None else {"max_tokens": max_tokens}
        return self.chat([{"role": "user", "content": content}], {**GREEDY, **limit}, on_text)

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        parameters: Mapping[str, Any] = GREEDY,
        on_text: Callable[[str], None] = lambda text: None,
    ) -> ChatAnswer:
        """The next answer of a conversation."""
        model = self.model()
        body = {
            "model": model,
            "messages": messages,
            "stream": True,
            "stream_options": {"include_usage": True},
            **parameters,
        }
        data = msgspec.json.encode(body)
        with self._reply("POST", "/v1/chat/completions", data) as reply:
            return self._read_answer(self._check_status(reply), model, on_text)

    def _read_answer(
        self, reply: http.client.HTTPResponse, model: str, on_text: Callable[[str], None]
    ) -> ChatAnswer:
        texts: list[str] = []
        finish, done = "", False
        usage: dict[str, Any] = {}
        timings: dict[str, float] = {}
        for line in self._lines(reply):
            if line.startswith(_TIMING):
                timings = read_timing(line[len(_TIMING) :].decode(errors="replace"))
            elif line.rstrip() == b"data: [DONE]":
                done = True
            elif line.startswith(b"data:"):
                chunk = self._decode(line[5:], _Chunk)
                if chunk.error is not None:
                    raise _to_error(reply.status, chunk.error)
                usage = chunk.usage or usage
                for choice in chunk.choices:
                    finish = choice.finish_reason or finish
                    if choice.delta.content:
                        texts.append(choice.delta.content)
                        on_text(choice.delta.content)
        if not done:
            raise ServiceError(
                f"the server at {self.url} closed the connection before the end of its answer"
            )
        return ChatAnswer("".join(texts), model, finish, usage, timings)

    def _open(self) -> http.client.HTTPConnection:
        if not self._secure:
            return http.client.HTTPConnection(self._host, self._port, timeout=CONNECT_SECONDS)
        context = unverified_context() if self._certificate else None
        return http.client.HTTPSConnection(
            self._host, self._port, timeout=CONNECT_SECONDS, context=context
        )

    def _check_certificate(self, connected: socket.socket) -> None:
        """Raise OSError if the server has another certificate than the one in the file."""
        if not self._certificate or not isinstance(connected, ssl.SSLSocket):
            return
        text = Path(self._certificate).read_text("latin-1")
        begin, end = "-----BEGIN CERTIFICATE-----", "-----END CERTIFICATE-----"
        first = begin + text.partition(begin)[2].partition(end)[0] + end
        if connected.getpeercert(True) != ssl.PEM_cert_to_DER_cert(first):
            raise OSError(f"its certificate is not the one in {self._certificate}")

    @contextmanager
    def _reply(
        self, method: str, path: str, body: bytes | None = None, *, key: bool = True
    ) -> Iterator[http.client.HTTPResponse]:
        """Open a request. Read its response under ``_reading``, which maps network errors."""
        connection = self._open()
        headers = self._headers | (self._key if key else {})
        try:
            try:
                connection.connect()
                self._check_certificate(connection.sock)
            except ssl.SSLCertVerificationError as error:
                raise ServiceError(_explain_certificate(self.url, error)) from None
            except OSError as error:
                raise ServerNotFound(
                    f"no server answers at {self.url}: {error.strerror or error}"
                ) from None
            connection.sock.settimeout(SILENT_SECONDS if body else CONNECT_SECONDS)
            with self._reading():
                with suppress(BrokenPipeError, ConnectionResetError):  # refused before all was sent
                    connection.request(method, self._path + path, body, headers)
                reply = connection.getresponse()
            yield reply
        finally:
            connection.close()

    @contextmanager
    def _reading(self) -> Iterator[None]:
        """Map errors of the network to errors with the server's URL."""
        try:
            yield
        except TimeoutError:
            raise ServiceError(f"the server at {self.url} does not answer") from None
        except (OSError, http.client.IncompleteRead) as error:
            why = str(error) or type(error).__name__
            raise NoHTTP(f"the server at {self.url} closed the connection: {why}") from None
        except http.client.HTTPException as error:
            why = f"{type(error).__name__} {error}".strip()
            raise NoHTTP(f"what answers at {self.url} does not speak HTTP: {why}") from None

    def _lines(self, reply: http.client.HTTPResponse) -> Iterator[bytes]:
        with self._reading():
            yield from reply

    def _read_all(self, reply: http.client.HTTPResponse) -> bytes:
        with self._reading():
            return reply.read()

    def _check_status(self, reply: http.client.HTTPResponse) -> http.client.HTTPResponse:
        if reply.status == 200:
            return reply
        error = self._decode(self._read_all(reply), _Chunk).error or _Error(
            f"status {reply.status}"
        )
        if reply.status == 401:
            error = msgspec.structs.replace(error, message=f"{error.message} {SET_KEY}")
        raise _to_error(reply.status, error)

    def _decode(self, data: bytes, type: type[T]) -> T:
        try:
            return msgspec.json.decode(data, type=type)
        except (msgspec.DecodeError, UnicodeDecodeError):
            raise ServiceError(f"what answers at {self.url} is not a Triptych server") from None


def _explain_certificate(url: str, error: ssl.SSLCertVerificationError) -> str:
    hint = " Set SSL_CERT_FILE to its PEM file." if error.verify_code in _UNKNOWN_ISSUER else ""
    return f"the certificate of {url} is not trusted: {error.verify_message.rstrip('.')}.{hint}"


def unverified_context() -> ssl.SSLContext:
    """For a server of this machine, whose certificate is for another name; see who uses it."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return context


class ServerNotFound(ServiceError):
    """No server listens there, or it is gone."""


class NoHTTP(ServerNotFound):
    """Something listens there, but gives no whole answer in HTTP."""


def _to_error(status: int, error: _Error) -> TriptychError:
    code = error.code or "service_unavailable"
    return rebuild_error(Failure(status, code, error.message, error.param))


def read_timing(header: str) -> dict[str, float]:
    """``encode;dur=12.3, prefill;dur=4.5`` as numbers."""
    found = re.findall(r"([\w-]+);dur=([0-9.]+)", header)
    return {stage: float(ms) for stage, ms in found}
