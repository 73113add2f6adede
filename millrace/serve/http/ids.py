"""Ids of requests and answers."""

from __future__ import annotations

import re
import secrets
from collections.abc import Iterable

from aiohttp import web

REQUEST_ID_HEADER = "X-Request-Id"
WARNING_HEADER = "X-Millrace-Warning"
"""Of an answer that is what was asked for, but may not be what is needed."""
_VALID_ID = re.compile(r"[!-~]{1,128}")


def warnings(said: Iterable[str]) -> dict[str, str]:
    """The header that says them; none if there are none. They are ASCII."""
    text = "; ".join(one for one in said if one)
    return {WARNING_HEADER: text} if text else {}


def new_id(prefix: str) -> str:
    return prefix + secrets.token_hex(16)


def request_id_of(request: web.BaseRequest) -> str:
    """The client's X-Request-Id if it is short and printable, otherwise a new id."""
    given = request.headers.get(REQUEST_ID_HEADER)
    if given is not None and _VALID_ID.fullmatch(given):
        return given
    return new_id("req-")
