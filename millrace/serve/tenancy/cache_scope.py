"""Who shares cached prefixes: the scope of a request, which becomes part of the names of its KV blocks.

A tenant's prefixes are its own unless its operator says otherwise. Scopes never meet: no client can write a
`cache_salt` that leads into the scope of a tenant.
"""

from __future__ import annotations

from millrace.serve.tenancy.keyring import DEFAULT_TENANT, Tenant

_MARK = "\0"
"""Before and after the name of a tenant, which contains none."""


def scope_of(tenant: Tenant, salt: str, *, share_prefixes: bool) -> str:
    """`salt`: the request's `cache_salt`. `share_prefixes`: the server's setting, for tenants that do not say."""
    if tenant is DEFAULT_TENANT:  # There are no tenants to keep apart.
        return salt
    is_private = tenant.private_cache if tenant.private_cache is not None else not share_prefixes
    if is_private:
        return f"{_MARK}{tenant.name}{_MARK}{salt}"
    return f"{_MARK}{_MARK}{salt}" if salt.startswith(_MARK) else salt
