"""Writes the audit log's line when a request has ended."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime

from aiohttp import web

from millrace.errors import MillraceError
from millrace.serve.http.app_keys import FINISH_WORD, REQUEST_ID, STATE, USAGE
from millrace.serve.tenancy.access import OPEN_PATHS
from millrace.serve.tenancy.gate import tenant_of

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@web.middleware
async def audit(request: web.Request, handler: Handler) -> web.StreamResponse:
    log = request.app[STATE].audit
    if log is None or request.path in OPEN_PATHS:
        return await handler(request)
    began, status, error = time.monotonic(), 499, None
    try:
        response = await handler(request)
        status = response.status
        return response
    except MillraceError as refusal:
        status, error = refusal.status, refusal.code or refusal.type
        raise
    except web.HTTPException as refusal:
        status = refusal.status
        raise
    except Exception:
        status, error = 500, "server_error"
        raise
    finally:
        usage = request.get(USAGE)
        log.write(
            {
                "time": datetime.now(UTC).isoformat(timespec="milliseconds"),
                "request_id": request[REQUEST_ID],
                "tenant": tenant_of(request).name,
                "peer": request.remote,
                "method": request.method,
                "path": request.path[:200],
                "status": status,
                "finish": request.get(FINISH_WORD),
                "error": error,
                "prompt_tokens": usage.prompt_tokens if usage is not None else None,
                "output_tokens": usage.completion_tokens if usage is not None else None,
                "seconds": round(time.monotonic() - began, 6),
            }
        )
