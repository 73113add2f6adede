"""Errors that users see. Each message says what happened, which value caused it and what to do.

An error that is sent over HTTP has a status and OpenAI's four fields (message, type, param, code). An error that
prevents the start is printed as its message. Users should never see any other exception.
"""

from __future__ import annotations


class MillraceError(Exception):
    """Base of all errors with a message for users."""

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
    """A setting is unknown, has an illegal value or conflicts with another setting."""

    status = 400
    type = "config_error"


class ModelError(MillraceError):
    """A model cannot be found, read or served. The message names the file or tensor and what to do."""

    type = "model_error"


class AdapterError(MillraceError):
    """An adapter cannot be read or does not fit the model. The message names the file and what to do."""

    status = 400
    type = "invalid_request_error"
    code = "adapter_invalid"


class DeviceFull(AdapterError):
    """The device has no memory left for an adapter. Others may be smaller."""


class MemoryPlanError(MillraceError):
    """Weights, activations and a usable KV pool do not fit into memory. The message names the setting to change."""

    type = "memory_error"


class BadRequest(MillraceError):
    """The request is invalid; sending it again unchanged will fail again."""

    status = 400
    type = "invalid_request_error"


class ContextOverflow(BadRequest):
    """Prompt plus `max_tokens` exceed the model's context or the KV pool. Requests are never truncated."""

    code = "context_length_exceeded"


class ModelNotFound(MillraceError):
    status = 404
    type = "invalid_request_error"
    code = "model_not_found"


class Unauthorized(MillraceError):
    """The API key is missing or unknown."""

    status = 401
    type = "authentication_error"
    code = "invalid_api_key"


class Forbidden(MillraceError):
    """The key is valid, but its tenant may not do this."""

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
    """The object exists, but its present state does not allow this operation."""

    status = 409
    type = "invalid_request_error"
    code = "conflict"


class NotImplementedYet(MillraceError):
    """A known part of a public API that this server does not implement."""

    status = 501
    type = "invalid_request_error"
    code = "not_implemented"


class Overloaded(MillraceError):
    """The waiting queue is full, or the wait would be too long. `retry_after_s` follows from the measured rate."""

    status = 429
    type = "rate_limit_error"
    code = "overloaded"

    def __init__(self, message: str, *, retry_after_s: float) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class QuotaExceeded(Overloaded):
    """A quota of the tenant is used up; other tenants are not affected."""

    code = "quota_exceeded"


class CacheFull(Overloaded):
    """No more prompts may be kept cached."""

    code = "cache_full"


class RequestCancelled(MillraceError):
    """The request was cancelled through the API."""

    status = 499
    type = "invalid_request_error"
    code = "request_cancelled"


class DeadlineExceeded(MillraceError):
    status = 504
    type = "timeout_error"
    code = "deadline_exceeded"


class EngineUnavailable(MillraceError):
    """The engine is starting, draining or not running. The client may try again later."""

    status = 503
    type = "server_error"
    code = "engine_unavailable"


class RequestFailed(MillraceError):
    """The step that computed this request failed, and this request caused it."""

    status = 500
    type = "server_error"
    code = "request_failed"
