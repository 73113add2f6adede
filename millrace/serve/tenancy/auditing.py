"""Writes a line to the audit log when a request, a line of a batch or a background response has ended."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import islice
from typing import Any

from aiohttp import web
from aiohttp.typedefs import Middleware

from millrace.errors import MillraceError
from millrace.observe.audit import AuditLog
from millrace.serve.http.app_keys import FINISH_REASON, LABELS, MODEL, REQUEST_ID, TOKEN_COUNTS
from millrace.serve.http.json_answer import encode
from millrace.serve.tenancy.access import OPEN_PATHS, Handler
from millrace.serve.tenancy.owner import tenant_of

MAX_LABELS = 16
MAX_LABEL_CHARS = 512


def audit(get_log: Callable[[], AuditLog | None]) -> Middleware:
    """Middleware that writes one audit line per request."""

    @web.middleware
    async def write_line(request: web.Request, handler: Handler) -> web.StreamResponse:
        log = get_log()
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
            ended = AuditEntry(
                request_id=request[REQUEST_ID],
                tenant=tenant_of(request).name,
                peer=request.remote,
                method=request.method,
                path=request.path[:200],
                model=request.get(MODEL),
                status=status,
                finish=request.get(FINISH_REASON),
                error=error,
                counts=request.get(TOKEN_COUNTS, (None,) * 4),
                began=began,
                labels=request.get(LABELS),
            )
            write_ended(log, ended)

    return write_line


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditEntry:
    """What has ended, and how."""

    request_id: str
    tenant: str
    peer: str | None
    method: str
    path: str
    model: str | None
    status: int
    finish: str | None
    error: str | None
    counts: tuple[int | None, ...]
    """Prompt tokens, output tokens, cached prompt tokens and output tokens of reasoning."""
    began: float
    labels: dict[str, Any] | None = None


def write_ended(log: AuditLog, ended: AuditEntry) -> None:
    prompt_tokens, output_tokens, cached_tokens, reasoning_tokens = ended.counts
    log.write(
        {
            "time": datetime.now(UTC).isoformat(timespec="milliseconds"),
            "request_id": ended.request_id,
            "tenant": ended.tenant,
            "peer": ended.peer,
            "method": ended.method,
            "path": ended.path,
            "model": ended.model,
            "status": ended.status,
            "finish": ended.finish,
            "error": ended.error,
            "prompt_tokens": prompt_tokens,
            "output_tokens": output_tokens,
            "cached_tokens": cached_tokens,
            "reasoning_tokens": reasoning_tokens,
            "seconds": round(time.monotonic() - ended.began, 6),
            **({"labels": _shown(ended.labels)} if ended.labels else {}),
        }
    )


def _shown(labels: dict[str, Any]) -> dict[str, str]:
    """The first of them, cut, so that a client cannot fill the log."""
    texts = {name: value if isinstance(value, str) else encode(value).decode() for name, value in labels.items()}
    return {name[:MAX_LABEL_CHARS]: text[:MAX_LABEL_CHARS] for name, text in islice(texts.items(), MAX_LABELS)}
