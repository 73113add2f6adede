"""The tenant of a request. Files, batches and stored responses are visible only to the tenant that created them."""

from __future__ import annotations

from aiohttp import web

from millrace.serve.tenancy.keyring import DEFAULT_TENANT, Tenant

TENANT = web.RequestKey("tenant", Tenant)


def tenant_of(request: web.Request) -> Tenant:
    tenant: Tenant = request.get(TENANT, DEFAULT_TENANT)
    return tenant


def is_operator(request: web.Request) -> bool:
    """True for a key that sees all tenants, and for everybody on a server that requires no keys."""
    tenant: Tenant | None = request.get(TENANT)
    return tenant is None or tenant.operator


def owner_of(request: web.Request) -> str:
    """The tenant's name; empty if the server requires no keys."""
    return tenant_of(request).name
