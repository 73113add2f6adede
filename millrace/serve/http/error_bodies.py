"""Every failure as an error body: our own, aiohttp's, and the unexpected.

OpenAI's four fields are always there. Where a path belongs to another API, they stand where its clients look.
"""

from __future__ import annotations

import math

from aiohttp import web

from millrace.errors import (
    BadRequest,
    BodyTooLarge,
    EngineUnavailable,
    MethodNotAllowed,
    MillraceError,
    NotFound,
    Overloaded,
)
from millrace.serve.http.ids import REQUEST_ID_HEADER
from millrace.serve.openai.answers import AnthropicErrorAnswer, ErrorAnswer, ErrorBody, OllamaErrorAnswer, encode

RETRY_AFTER_S = 5
"""When the engine is loading, draining or gone; nobody knows better."""


ANTHROPIC_PATHS, OLLAMA_PATHS = "/v1/messages", "/api/"
_ANTHROPIC_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


def error_body(error: MillraceError, path: str = "") -> bytes:
    if path.startswith(ANTHROPIC_PATHS):
        return anthropic_error_body(error)
    if path.startswith(OLLAMA_PATHS):
        return ollama_error_body(error)
    return encode(ErrorAnswer(ErrorBody(error.message, error.type, error.param, error.code)))


def anthropic_error_body(error: MillraceError) -> bytes:
    kind = _ANTHROPIC_TYPES.get(error.status, "api_error" if error.status >= 500 else "invalid_request_error")
    return encode(AnthropicErrorAnswer("error", ErrorBody(error.message, kind, error.param, error.code)))


def ollama_error_body(error: MillraceError) -> bytes:
    return encode(OllamaErrorAnswer(error.message, error.message, error.type, error.param, error.code))


def error_event(error: MillraceError) -> bytes:
    return b"data: " + error_body(error) + b"\n\n"


def error_response(error: MillraceError, request_id: str, path: str = "") -> web.Response:
    headers = {REQUEST_ID_HEADER: request_id, "Server": "millrace"}
    if isinstance(error, Overloaded):
        headers["Retry-After"] = str(max(1, math.ceil(error.retry_after_s)))
    elif isinstance(error, EngineUnavailable):
        headers["Retry-After"] = str(RETRY_AFTER_S)
    elif isinstance(error, AllowedMethods):
        headers["Allow"] = ", ".join(error.methods)
    body = error_body(error, path)
    return web.Response(status=error.status, body=body, headers=headers, content_type="application/json")


class AllowedMethods(MethodNotAllowed):
    """A 405 that says, as HTTP wants it, what would be allowed."""

    def __init__(self, message: str, methods: list[str]) -> None:
        super().__init__(message)
        self.methods = methods


def from_aiohttp(error: web.HTTPException, request: web.Request, paths: list[str]) -> MillraceError:
    """What aiohttp's router and reader raise, in our words."""
    if isinstance(error, web.HTTPNotFound):
        return NotFound(
            f"There is no {request.method[:20]} {request.path[:200]!r} here; GET /docs lists what there is."
            + _nearest_path(request.path, paths)
        )
    if isinstance(error, web.HTTPMethodNotAllowed):
        methods = sorted(error.allowed_methods)
        return AllowedMethods(
            f"{request.method[:20]} is not allowed on {request.path[:200]}; use {' or '.join(methods)}.", methods
        )
    if isinstance(error, web.HTTPRequestEntityTooLarge):
        return BodyTooLarge("The body is too large; send less.")
    return OtherHttpError(error.status, error.reason)


class OtherHttpError(BadRequest):
    """A refusal of the HTTP layer that has no class of its own."""

    def __init__(self, status: int, reason: str) -> None:
        super().__init__(f"The request was refused: {reason}. Correct it and send it again.", code="http_error")
        self.status = status


def _nearest_path(path: str, paths: list[str]) -> str:
    import difflib

    close = difflib.get_close_matches(path[:200], paths, n=1, cutoff=0.7)
    return f" Did you mean {close[0]}?" if close else ""
