"""The tree of errors. Each knows its HTTP status, its stable code and what to do about it.

TriptychError
├── RequestError            the client's to mend
│   ├── InvalidHTTP             400 invalid_http
│   ├── InvalidJSON             400 invalid_json
│   ├── InvalidValue            400 invalid_value
│   ├── UnsupportedParameter    400 unsupported_parameter
│   ├── ContextLengthExceeded   400 context_length_exceeded
│   ├── InvalidAPIKey           401 invalid_api_key
│   ├── Forbidden               403 forbidden
│   ├── NotFound                404 not_found
│   ├── ModelNotFound           404 model_not_found
│   ├── MediaNotFound           404 media_not_found
│   ├── MethodNotAllowed        405 method_not_allowed
│   ├── RequestTimeout          408 request_timeout
│   ├── PayloadTooLarge         413 payload_too_large
│   ├── HeadersTooLarge         431 headers_too_large
│   └── MediaError              a part of the request that is no text
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
│       ├── InvalidEmbedding        400 invalid_embedding
│       ├── EmbeddingShapeMismatch  400 embedding_shape_mismatch
│       └── TooManyMedia            400 too_many_media
├── ServiceError            ours to mend; the client may try again
│   ├── Overloaded              429 server_overloaded
│   ├── EngineFailed            500 engine_failed
│   ├── BrokenInstallation      500 broken_installation
│   ├── OutOfMemory             503 out_of_memory
│   ├── DecoderLost             503 decoder_lost
│   ├── NoWorkers               503 no_workers
│   ├── NatsUnavailable         503 nats_away
│   ├── WorkerLost              503 worker_lost
│   ├── TicketLost              503 ticket_lost
│   ├── PrefixEvicted           503 prefix_gone
│   └── Draining                503 draining
└── StartError              the operator's to mend, before anything is served
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
    """Anything that Triptych says on purpose."""

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


class InvalidValue(RequestError):
    code = "invalid_value"


class UnsupportedParameter(RequestError):
    code = "unsupported_parameter"


class ContextLengthExceeded(RequestError):
    code = "context_length_exceeded"

    @classmethod
    def of(cls, prompt: int, max_tokens: int | None, limit: int) -> Self:
        """``max_tokens``: what the client asked for, if it did."""
        if max_tokens is None:
            return cls(
                f"The prompt has {prompt} tokens, but the context holds {limit}, of which one is "
                "for the answer at least. Shorten the prompt.",
                param="messages",
            )
        return cls(
            f"The prompt has {prompt} tokens and max_tokens is {max_tokens}, but the context holds "
            f"{limit}. Shorten the prompt or lower max_tokens.",
            param="messages",
        )


class InvalidAPIKey(RequestError):
    status = 401
    code = "invalid_api_key"


class Forbidden(RequestError):
    """A key that is known, on a path that another kind of key opens."""

    status = 403
    code = "forbidden"


class NotFound(RequestError):
    status = 404
    code = "not_found"


class ModelNotFound(RequestError):
    status = 404
    code = "model_not_found"


class MediaNotFound(RequestError):
    """A handle that was never given out to this key, or has expired."""

    status = 404
    code = "media_not_found"


class MethodNotAllowed(RequestError):
    status = 405
    code = "method_not_allowed"


class RequestTimeout(RequestError):
    status = 408
    code = "request_timeout"


class PayloadTooLarge(RequestError):
    status = 413
    code = "payload_too_large"


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
    """A library that is installed does not fit our code."""

    status = 500
    code = "broken_installation"


class OutOfMemory(ServiceError):
    """The machine has no memory left for this."""

    code = "out_of_memory"


class DecoderLost(ServiceError):
    """Decoding processes were killed from outside again and again, or cannot be started."""

    code = "decoder_lost"


class NoWorkers(ServiceError):
    code = "no_workers"


class NatsUnavailable(ServiceError):
    """No worker can be asked while NATS, through which they are called, is away."""

    code = "nats_away"


class WorkerLost(ServiceError):
    code = "worker_lost"


class TicketLost(ServiceError):
    code = "ticket_lost"


class PrefixEvicted(ServiceError):
    """A worker was to prefill from its cache, and what is needed of it is not there any more."""

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
    """The error that a Failure was made from; an unknown code becomes a plain TriptychError."""
    kind = _BY_CODE.get(failure.code, TriptychError)
    error = kind(failure.message, param=failure.param)
    error.status, error.code = failure.status, failure.code
    return error


def first_error(errors: BaseExceptionGroup) -> BaseException:
    """The error to tell: one that we raised on purpose, else whatever there is."""
    told, rest = errors.split(TriptychError)
    error: BaseException = rest or errors if told is None else told
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


def install_hint(extra: str) -> str:
    """What to do where packages are missing. With its version pip takes the Triptych that is
    installed already: it needs no index that has one."""
    return (
        f"Install with: {sys.executable} -m pip install 'triptych[{extra}]=={__version__}' (in a "
        f"checkout: pip install -c constraints.txt -e '.[{extra}]')"
    )
