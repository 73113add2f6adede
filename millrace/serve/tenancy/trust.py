"""Who is more than a client: programs on this machine, and gateways."""

from __future__ import annotations

import hmac
import ipaddress

from aiohttp import web

from millrace.serve.tenancy.owner import is_operator

GATEWAY_KEY_HEADER = "X-Millrace-Gateway-Key"
_FORWARDED = ("Forwarded", "X-Forwarded-For", "X-Forwarded-Host", "X-Real-IP")


def is_gateway(request: web.Request, host: str, gateway_key: str, *, has_keys: bool) -> bool:
    """True for the gateway's key and for operators' keys; on a server without either, for programs on this machine."""
    given = request.headers.get(GATEWAY_KEY_HEADER, "")
    if gateway_key and hmac.compare_digest(given.encode(errors="surrogateescape"), gateway_key.encode()):
        return True
    if has_keys:
        return is_operator(request)
    return not gateway_key and is_from_here(request, host)


def may_manage(request: web.Request, setting: str, host: str, *, has_keys: bool) -> bool:
    """Whether the client may change what this machine holds, by `--manage-models`: with `local` operators' keys, and on
    a server without keys programs on this machine."""
    may = is_operator(request) if has_keys else is_from_here(request, host)
    return setting == "always" or (setting == "local" and may)


def is_from_here(request: web.Request, host: str) -> bool:
    """True if only programs on this machine can have sent the request. `host`: where the server listens.

    The host that the client names is checked too: the name of a web page may be made to point to this machine.
    """
    is_forwarded = any(header in request.headers for header in _FORWARDED)
    return is_loopback(host) and is_loopback(request.url.host or "") and not is_forwarded


def is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host.lower() == "localhost"
