"""Whose things are whose: files, batches and stored responses are visible only to the tenant that made them."""

from __future__ import annotations

from aiohttp import web

from millrace.serve.tenancy.gate import tenant_of


def owner_of(request: web.Request) -> str:
    """The tenant's name; empty where requests are not told apart."""
    return tenant_of(request).name
