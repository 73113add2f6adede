"""Who shares cached prefixes: the scope of a request, which becomes part of the names of its KV blocks.

A tenant's prefixes are its own unless its operator says otherwise. Scopes never meet: no client can write a
`cache_salt` that leads into the scope of a tenant.
"""

from __future__ import annotations

import hashlib
import hmac

from millrace.errors import BadRequest
from millrace.serve.tenancy.keyring import DEFAULT_TENANT, Tenant

_MARK = "\0"
"""Before and after the name of a tenant, which contains none."""


SALT_HEADER = "X-Millrace-Cache-Salt"
"""With it a gateway keeps its tenants apart on a server that does not know them. It needs no trust: like `cache_salt`
it leads only to what was sent with the same value, and nobody can guess a gateway's."""
MAX_HEADER_CHARS = 128


def gateway_salt(tenant: Tenant, secret: bytes, *, share_prefixes: bool) -> str:
    """What a gateway sends for a tenant whose prefixes are its own; empty for one who shares them."""
    if tenant is DEFAULT_TENANT or shares_prefixes(tenant, is_default=share_prefixes):
        return ""
    return hmac.new(secret, b"cache salt of " + tenant.name.encode(), hashlib.sha256).hexdigest()


def salted(given: str, salt: str) -> str:
    """The request's `cache_salt` under what a gateway gave in its header."""
    if len(given) > MAX_HEADER_CHARS or _MARK in given:
        raise BadRequest(f"{SALT_HEADER} has at most {MAX_HEADER_CHARS} characters.", param=SALT_HEADER)
    return f"{given}{_MARK}{salt}" if given else salt


def shares_prefixes(tenant: Tenant, *, is_default: bool) -> bool:
    """`is_default`: the server's setting, for tenants that do not say."""
    return is_default if tenant.private_cache is None else not tenant.private_cache


def scope_of(tenant: Tenant, salt: str, *, share_prefixes: bool) -> str:
    """`salt`: the request's `cache_salt`. `share_prefixes`: the server's setting, for tenants that do not say."""
    if tenant is DEFAULT_TENANT:  # There are no tenants to keep apart.
        return salt
    if not shares_prefixes(tenant, is_default=share_prefixes):
        return f"{_MARK}{tenant.name}{_MARK}{salt}"
    return f"{_MARK}{_MARK}{salt}" if salt.startswith(_MARK) else salt


def salt_of(tenant: Tenant, scope: str) -> str:
    """The `cache_salt` of a request of this tenant, given its scope."""
    own = f"{_MARK}{tenant.name}{_MARK}"
    return scope.removeprefix(own) if scope.startswith(own) else scope.removeprefix(_MARK + _MARK)
