"""JSON as it is sent: encoding, escaping inside streams, and whole JSON responses."""

from __future__ import annotations

from typing import Any

import msgspec
from aiohttp import web

from millrace.serve.http.app_keys import REQUEST_ID
from millrace.serve.http.ids import REQUEST_ID_HEADER

encode = msgspec.json.Encoder().encode


def escape_text(text: str) -> bytes:
    """A text as a JSON string that is safe inside one line of a stream."""
    data = encode(text)
    return data if text.isascii() else escape_lines(data)


def escape_lines(json: bytes) -> bytes:
    """Escape the three Unicode line breaks that JSON allows unescaped.

    Some clients split a stream into lines by Unicode's rules rather than those of server-sent events.
    """
    return (
        json.replace(b"\xc2\x85", b"\\u0085").replace(b"\xe2\x80\xa8", b"\\u2028").replace(b"\xe2\x80\xa9", b"\\u2029")
    )


def json_answer(request: web.Request, body: Any, *, status: int = 200, **headers: str) -> web.Response:
    """`body` is a value to encode, or JSON bytes."""
    return web.Response(
        status=status,
        body=body if isinstance(body, bytes) else encode(body),
        headers={REQUEST_ID_HEADER: request[REQUEST_ID], "Server": "millrace", **headers},
        content_type="application/json",
    )
