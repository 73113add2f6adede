"""The tenant of a request. Files, batches and stored responses are visible only to the tenant that created them."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Awaitable, Callable
from urllib.parse import quote

from aiohttp import web
from aiohttp.typedefs import Middleware

from millrace.errors import BadRequest
from millrace.serve.tenancy.keyring import DEFAULT_TENANT, Tenant

TENANT = web.RequestKey("tenant", Tenant)


OWNER_HEADER = "X-Millrace-Owner"
"""With it a gateway that checks keys names its tenant to a replica without keys, which keeps their things apart."""
MAX_OWNER_CHARS = 1024
_OPERATOR = ";operator"
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def gateway_owner(tenant: Tenant, secret: bytes) -> str:
    """What a gateway sends for its tenant; empty without tenants. Its prefixes are named after it, so it has a part
    that nobody guesses who does not know the secret."""
    if tenant is DEFAULT_TENANT:
        return ""
    name = tenant.name.encode("utf-8", "surrogatepass")
    digest = hmac.new(secret, b"owner " + name, hashlib.sha256).hexdigest()[:32]
    return f"{quote(name, safe='')}@{digest}{_OPERATOR if tenant.operator else ''}"


def owned_by_gateway(is_trusted: Callable[[web.Request], bool]) -> Middleware:
    """Middleware for a server without keys: the tenant is the one that a trusted gateway names. Others name nobody."""

    @web.middleware
    async def set_tenant(request: web.Request, handler: Handler) -> web.StreamResponse:
        given = request.headers.get(OWNER_HEADER)
        if given and TENANT not in request and is_trusted(request):
            if len(given) > MAX_OWNER_CHARS:
                raise BadRequest(f"{OWNER_HEADER} has at most {MAX_OWNER_CHARS} characters.", param=OWNER_HEADER)
            name = given.removesuffix(_OPERATOR)
            # The prefixes of its requests are apart by the salt that the gateway sends with them.
            request[TENANT] = Tenant(name=name, operator=name != given, private_cache=False)
        return await handler(request)

    return set_tenant


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
