"""The tree of errors. Each knows its HTTP status, its stable code and what to do about it.

TriptychError
├── RequestError            the client must change its request
│   ├── InvalidHTTP             400 invalid_http
│   ├── InvalidJSON             400 invalid_json
│   ├── InvalidForm             400 invalid_form
│   ├── InvalidValue            400 invalid_value
│   ├── UnsupportedParameter    400 unsupported_parameter
│   ├── InvalidSchema           400 invalid_schema
│   ├── ContextLengthExceeded   400 context_length_exceeded
│   ├── InvalidAPIKey           401 invalid_api_key
│   ├── Forbidden               403 forbidden
│   ├── NotFound                404 not_found
│   ├── ModelNotFound           404 model_not_found
│   ├── MediaNotFound           404 media_not_found
│   ├── ResponseNotFound        404 response_not_found
│   ├── MethodNotAllowed        405 method_not_allowed
│   ├── RequestTimeout          408 request_timeout
│   ├── PayloadTooLarge         413 payload_too_large
│   ├── RateLimitExceeded       429 rate_limit_exceeded
│   ├── HeadersTooLarge         431 headers_too_large
│   └── MediaError              an image, video or audio of the request
│       ├── MediaDisabled           400 media_disabled
│       ├── UnsupportedURLScheme    400 unsupported_url_scheme
│       ├── InvalidDataURL          400 invalid_data_url
│       ├── InvalidMedia            400 invalid_media
│       ├── UnsupportedMediaType    400 unsupported_media_type
│       ├── ImageTooLarge           400 image_too_large
│       ├── ImageTooSmall           400 image_too_small
│       ├── TooManyFrames           400 too_many_frames
│       ├── AudioTooLong            400 audio_too_long
│       ├── MediaTooLarge           400 media_too_large
│       ├── MediaURLBlocked         400 media_url_blocked
│       ├── MediaFetchFailed        400 media_fetch_failed
│       ├── MediaFetchTimeout       400 media_fetch_timeout
│       ├── LocalMediaForbidden     400 local_media_forbidden
│       ├── UnknownMediaUUID        400 unknown_media_uuid
│       ├── InvalidEmbedding        400 invalid_embedding
│       ├── EmbeddingShapeMismatch  400 embedding_shape_mismatch
│       └── TooManyMedia            400 too_many_media
├── ServiceError            a fault of the server; the client may try again
│   ├── Overloaded              429 server_overloaded
│   ├── EngineFailed            500 engine_failed
│   ├── BrokenInstallation      500 broken_installation
│   ├── OutOfMemory             503 out_of_memory
│   ├── DecoderLost             503 decoder_lost
│   ├── NoWorkers               503 no_workers
│   ├── NatsAway                503 nats_away
│   ├── WorkerLost              503 worker_lost
│   ├── TicketLost              503 ticket_lost
│   ├── PrefixGone              503 prefix_gone
│   └── Draining                503 draining
└── StartError              the operator must change the settings; nothing is served
    ├── InvalidPattern
    ├── InvalidConfig
    └── UnsupportedModel
"""

from __future__ import annotations

import sys
from typing import Self

from triptych import __version__
from triptych.messages import Failure


class TriptychError(Exception):
    """Base of all errors that Triptych raises on purpose."""

    status: int = 500
    code: str = "internal_error"

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param

    def failure(self) -> Failure:
        return Failure(self.status, self.code, self.message, self.param)


class RequestError(TriptychError):
    status = 400


class InvalidHTTP(RequestError):
    code = "invalid_http"


class InvalidJSON(RequestError):
    code = "invalid_json"


class InvalidForm(RequestError):
    """A body that should be multipart/form-data."""

    code = "invalid_form"


class InvalidValue(RequestError):
    code = "invalid_value"


class UnsupportedParameter(RequestError):
    code = "unsupported_parameter"


class InvalidSchema(RequestError):
    """A JSON schema, regular expression or grammar that is wrong, not supported or too complex."""

    code = "invalid_schema"


class ContextLengthExceeded(RequestError):
    code = "context_length_exceeded"

    @classmethod
    def of(
        cls, prompt: int, max_tokens: int | None, limit: int, *, without_media: bool = False
    ) -> Self:
        """``max_tokens``: what the client asked for, or None. ``without_media``: the prompt has
        media, whose tokens are not counted yet."""
        tokens = f"{prompt} tokens"
        if without_media:
            tokens = f"at least {prompt} tokens, without its media"
        if max_tokens is None:
            return cls(
                f"The prompt has {tokens}, but the context holds {limit}, at least one of "
                "them for the answer. Shorten the prompt.",
                param="messages",
            )
        return cls(
            f"The prompt has {tokens}, and max_tokens is {max_tokens}, but the context holds "
            f"{limit}. Shorten the prompt or lower max_tokens.",
            param="messages",
        )


class InvalidAPIKey(RequestError):
    status = 401
    code = "invalid_api_key"


class Forbidden(RequestError):
    """A valid key on a path that needs another kind of key."""

    status = 403
    code = "forbidden"


class NotFound(RequestError):
    status = 404
    code = "not_found"


class ModelNotFound(RequestError):
    status = 404
    code = "model_not_found"


class MediaNotFound(RequestError):
    """A handle that this key never got, or that has expired."""

    status = 404
    code = "media_not_found"


class ResponseNotFound(RequestError):
    status = 404
    code = "response_not_found"


class MethodNotAllowed(RequestError):
    status = 405
    code = "method_not_allowed"


class RequestTimeout(RequestError):
    status = 408
    code = "request_timeout"


class PayloadTooLarge(RequestError):
    status = 413
    code = "payload_too_large"


class RateLimitExceeded(RequestError):
    """The key has used what its limits allow."""

    status = 429
    code = "rate_limit_exceeded"

    def __init__(
        self, message: str, retry_seconds: float = 1.0, *, param: str | None = None
    ) -> None:
        super().__init__(message, param=param)
        self.retry_seconds = retry_seconds


class HeadersTooLarge(RequestError):
    status = 431
    code = "headers_too_large"


class MediaError(RequestError):
    pass


class MediaDisabled(MediaError):
    code = "media_disabled"


class UnsupportedURLScheme(MediaError):
    code = "unsupported_url_scheme"


class InvalidDataURL(MediaError):
    code = "invalid_data_url"


class InvalidMedia(MediaError):
    code = "invalid_media"


class UnsupportedMediaType(MediaError):
    code = "unsupported_media_type"


class ImageTooLarge(MediaError):
    code = "image_too_large"


class ImageTooSmall(MediaError):
    code = "image_too_small"


class TooManyFrames(MediaError):
    code = "too_many_frames"


class AudioTooLong(MediaError):
    code = "audio_too_long"


class MediaTooLarge(MediaError):
    code = "media_too_large"


class MediaURLBlocked(MediaError):
    code = "media_url_blocked"


class MediaFetchFailed(MediaError):
    code = "media_fetch_failed"


class MediaFetchTimeout(MediaError):
    code = "media_fetch_timeout"


class LocalMediaForbidden(MediaError):
    code = "local_media_forbidden"


class UnknownMediaUUID(MediaError):
    """A uuid without media, of which nothing is stored for this key."""

    code = "unknown_media_uuid"


class InvalidEmbedding(MediaError):
    code = "invalid_embedding"


class EmbeddingShapeMismatch(MediaError):
    code = "embedding_shape_mismatch"


class TooManyMedia(MediaError):
    code = "too_many_media"


class ServiceError(TriptychError):
    status = 503
    code = "service_unavailable"


class Overloaded(ServiceError):
    status = 429
    code = "server_overloaded"


class EngineFailed(ServiceError):
    status = 500
    code = "engine_failed"


class BrokenInstallation(ServiceError):
    """An installed library is incompatible with this version."""

    status = 500
    code = "broken_installation"


class OutOfMemory(ServiceError):
    """The machine has no memory left."""

    code = "out_of_memory"


class DecoderLost(ServiceError):
    """Sandboxes were killed from outside repeatedly, or cannot be started."""

    code = "decoder_lost"


class NoWorkers(ServiceError):
    code = "no_workers"


class NatsAway(ServiceError):
    """NATS is unreachable, and workers are called through it."""

    code = "nats_away"


class WorkerLost(ServiceError):
    code = "worker_lost"


class TicketLost(ServiceError):
    code = "ticket_lost"


class PrefixGone(ServiceError):
    """A worker should prefill from its cache, but the blocks are evicted."""

    code = "prefix_gone"


class Draining(ServiceError):
    code = "draining"


class StartError(TriptychError):
    code = "start_error"


class InvalidPattern(StartError):
    def __init__(self, pattern: str, why: str) -> None:
        super().__init__(
            f"pattern '{pattern}' cannot be served: {why}. "
            "Write EPD, E/PD, E/P/D or EP/D, with counts as in E*2/P/D*3."
        )


class InvalidConfig(StartError):
    pass


class UnsupportedModel(StartError):
    pass


def _leaves(base: type[TriptychError]) -> list[type[TriptychError]]:
    return [base, *(leaf for sub in base.__subclasses__() for leaf in _leaves(sub))]


_BY_CODE = {error.code: error for base in (RequestError, ServiceError) for error in _leaves(base)}


def rebuild_error(failure: Failure) -> TriptychError:
    """The error of a Failure; an unknown code becomes a plain TriptychError."""
    kind = _BY_CODE.get(failure.code, TriptychError)
    error = kind(failure.message, param=failure.param)
    error.status, error.code = failure.status, failure.code
    return error


def first_error(errors: BaseExceptionGroup) -> BaseException:
    """The error of a group to report: a TriptychError if there is one, else the first."""
    ours, rest = errors.split(TriptychError)
    error: BaseException = rest or errors if ours is None else ours
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


def install_hint(extra: str) -> str:
    """What to do when packages are missing. The version makes pip accept the installed Triptych,
    so that it needs no index that has one."""
    return (
        f"Install with: {sys.executable} -m pip install 'triptych[{extra}]=={__version__}' (in a "
        f"checkout: pip install -c constraints.txt -e '.[{extra}]')"
    )
