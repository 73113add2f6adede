"""Typed keys under which aiohttp carries our objects."""

from __future__ import annotations

from typing import Any

from aiohttp import web

from millrace.serve.openai.answers import Usage
from millrace.serve.state import FrontState
from millrace.serve.tenancy.keyring import Tenant

STATE = web.AppKey("state", FrontState)
# aiohttp has typed keys for requests since 3.14; before, plain strings do.
REQUEST_ID: Any = web.RequestKey("request_id", str) if hasattr(web, "RequestKey") else "request_id"
FINISH_WORD: Any = web.RequestKey("finish_word", str) if hasattr(web, "RequestKey") else "finish_word"
USAGE: Any = web.RequestKey("usage", Usage) if hasattr(web, "RequestKey") else "usage"
TENANT: Any = web.RequestKey("tenant", Tenant) if hasattr(web, "RequestKey") else "tenant"
EXTRA_HEADERS: Any = web.RequestKey("extra_headers", dict) if hasattr(web, "RequestKey") else "extra_headers"
"""Headers that every response to this request carries, streams included."""
OPENAPI = web.AppKey("openapi", bytes)
DOCS = web.AppKey("docs", str)
