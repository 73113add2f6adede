"""Failures as HTTP error responses: our own errors and those that aiohttp raises."""

from __future__ import annotations

import math
from collections.abc import Callable

import msgspec
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
from millrace.serve.http.json_answer import encode

RETRY_AFTER_S = 5
"""`Retry-After` while the engine is loading, draining or gone."""


class ErrorBody(msgspec.Struct):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorAnswer(msgspec.Struct):
    """Every error, whatever its status."""

    error: ErrorBody


def error_body(error: MillraceError) -> bytes:
    """OpenAI's shape. Dialects with another shape have a function of their own, chosen by path in `routing`."""
    return encode(ErrorAnswer(ErrorBody(error.message, error.type, error.param, error.code)))


def error_response(
    error: MillraceError, request_id: str, write_body: Callable[[MillraceError], bytes] = error_body
) -> web.Response:
    headers = {REQUEST_ID_HEADER: request_id, "Server": "millrace"}
    if isinstance(error, Overloaded):
        headers["Retry-After"] = str(max(1, math.ceil(error.retry_after_s)))
    elif isinstance(error, EngineUnavailable):
        headers["Retry-After"] = str(RETRY_AFTER_S)
    elif isinstance(error, AllowedMethods):
        headers["Allow"] = ", ".join(error.methods)
    return web.Response(status=error.status, body=write_body(error), headers=headers, content_type="application/json")


class AllowedMethods(MethodNotAllowed):
    """A 405 with the header `Allow`."""

    def __init__(self, message: str, methods: list[str]) -> None:
        super().__init__(message)
        self.methods = methods


def from_aiohttp(error: web.HTTPException, request: web.Request, hint: str = "") -> MillraceError:
    """An exception of aiohttp's router or reader as one of our errors. `hint`: what to do if the path is unknown."""
    if isinstance(error, web.HTTPNotFound):
        missing = f"There is no {request.method[:20]} {request.path[:200]!r} here; GET /docs lists all endpoints."
        return NotFound(f"{missing} {hint}".rstrip())
    if isinstance(error, web.HTTPMethodNotAllowed):
        methods = sorted(error.allowed_methods)
        return AllowedMethods(
            f"{request.method[:20]} is not allowed on {request.path[:200]}; use {' or '.join(methods)}.", methods
        )
    if isinstance(error, web.HTTPRequestEntityTooLarge):
        return BodyTooLarge("The body is too large; send a smaller one.")
    return OtherHttpError(error.status, error.reason)


class OtherHttpError(BadRequest):
    """Another error of the HTTP layer, with its own status."""

    def __init__(self, status: int, reason: str) -> None:
        super().__init__(f"The request was refused: {reason}. Correct it and send it again.", code="http_error")
        self.status = status
