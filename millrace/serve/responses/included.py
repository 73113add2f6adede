"""The query parameter `include` of responses and conversations."""

from __future__ import annotations

from aiohttp import web

from millrace.errors import BadRequest
from millrace.serve.responses.schemas import ENCRYPTED_REASONING, LOGPROBS


def check_include(request: web.Request) -> None:
    """Refuse further fields of items that nothing here has."""
    for name in (*request.query.getall("include", ()), *request.query.getall("include[]", ())):
        if name not in (LOGPROBS, ENCRYPTED_REASONING):
            raise BadRequest(
                f"include is {name[:80]!r}, which is not supported yet; remove it.",
                param="include",
                code="unsupported_parameter",
            )
