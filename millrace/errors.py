"""Every error a user can meet: what happened, which value, and what to do about it.

An error that crosses HTTP carries its status and OpenAI's four fields. One that stops a start
carries only its sentence. Nothing else in the tree raises a bare exception at a user.
"""

from __future__ import annotations


class MillraceError(Exception):
    """The base of every designed failure. `str(error)` is a sentence that a person can act on."""

    status = 500
    type = "server_error"
    code: str | None = None

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        if code is not None:
            self.code = code


class ConfigError(MillraceError):
    """A setting is unknown, malformed or contradicts another."""

    status = 400
    type = "config_error"


class ModelError(MillraceError):
    """A model cannot be found, read or served. The message names the file, the tensor and the remedy."""

    type = "model_error"


class MemoryPlanError(MillraceError):
    """The model, its activations and a usable KV pool do not fit. The message names the setting to change."""

    type = "memory_error"


class BadRequest(MillraceError):
    """The request itself is wrong; sending it again unchanged will fail again."""

    status = 400
    type = "invalid_request_error"


class ContextOverflow(BadRequest):
    """Prompt plus `max_tokens` exceed what the model or the KV pool can hold. Never clipped."""

    code = "context_length_exceeded"


class ModelNotFound(MillraceError):
    status = 404
    type = "invalid_request_error"
    code = "model_not_found"


class Unauthorized(MillraceError):
    """No API key, or one that this server does not know."""

    status = 401
    type = "authentication_error"
    code = "invalid_api_key"


class Forbidden(MillraceError):
    """The key is good, but its tenant may not do this."""

    status = 403
    type = "permission_error"
    code = "not_allowed"


class NotFound(MillraceError):
    status = 404
    type = "invalid_request_error"
    code = "not_found"


class MethodNotAllowed(MillraceError):
    status = 405
    type = "invalid_request_error"
    code = "method_not_allowed"


class RequestTimeout(MillraceError):
    """The client did not send its request in time."""

    status = 408
    type = "invalid_request_error"
    code = "request_timeout"


class HeadersTooLarge(MillraceError):
    status = 431
    type = "invalid_request_error"
    code = "headers_too_large"


class BodyTooLarge(MillraceError):
    status = 413
    type = "invalid_request_error"
    code = "body_too_large"


class UnsupportedMediaType(MillraceError):
    status = 415
    type = "invalid_request_error"
    code = "unsupported_media_type"


class Conflict(MillraceError):
    """The thing exists, but not in a state in which this can be done to it."""

    status = 409
    type = "invalid_request_error"
    code = "conflict"


class NotImplementedYet(MillraceError):
    """A part of a public API that this server knows of and does not have."""

    status = 501
    type = "invalid_request_error"
    code = "not_implemented"


class Overloaded(MillraceError):
    """The bounded queue is full. `retry_after_s` comes from the measured drain rate."""

    status = 429
    type = "rate_limit_error"
    code = "overloaded"

    def __init__(self, message: str, *, retry_after_s: float) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class QuotaExceeded(Overloaded):
    """The tenant's own limit is reached; other tenants are served."""

    code = "quota_exceeded"


class RequestCancelled(MillraceError):
    """Somebody cancelled the request through the API."""

    status = 499
    type = "invalid_request_error"
    code = "request_cancelled"


class DeadlineExceeded(MillraceError):
    status = 504
    type = "timeout_error"
    code = "deadline_exceeded"


class EngineUnavailable(MillraceError):
    """The engine is starting, draining or gone. The client may try again later."""

    status = 503
    type = "server_error"
    code = "engine_unavailable"


class RequestFailed(MillraceError):
    """The step that computed this request failed, and the request was found to be the cause."""

    status = 500
    type = "server_error"
    code = "request_failed"
