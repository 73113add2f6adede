"""Typed keys under which aiohttp carries our values: of the application and of each request."""

from __future__ import annotations

from aiohttp import web

from millrace.observe.tracing.request_trace import RequestTrace

REQUEST_ID = web.RequestKey("request_id", str)
FINISH_REASON = web.RequestKey("finish_reason", str)
STREAM_STATUS = web.RequestKey("stream_status", int)
"""Status of an error that ended a stream whose head said 200."""
"""How generation ended, for metrics and the audit log; absent where nothing was generated."""
MODEL = web.RequestKey("model", str)
"""Name of the model that generated the answer."""
ADAPTER = web.RequestKey("adapter", tuple)
"""Names of the model and its adapter that the request is for; absent without an adapter."""
TOKEN_COUNTS = web.RequestKey("token_counts", tuple)
"""Prompt tokens, output tokens, cached prompt tokens and output tokens of reasoning, where text was generated."""
LABELS = web.RequestKey("labels", dict)
"""Labels that the client gave the request, for the audit log."""
EXTRA_HEADERS = web.RequestKey("extra_headers", dict)
"""Headers that every response to this request carries, streams included."""
TRACE = web.RequestKey("trace", RequestTrace)
"""Spans of this request; absent if none are exported."""
