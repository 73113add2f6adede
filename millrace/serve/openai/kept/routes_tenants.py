"""DELETE /v1/tenants/{tenant}/cache: an operator forgets what a tenant left in the cache."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from typing import Literal

import msgspec
from aiohttp import web

from millrace.errors import BadRequest, Conflict, EngineUnavailable, Forbidden, MillraceError, NotImplementedYet
from millrace.link.forgotten import ForgottenTenant
from millrace.serve.http.json_answer import json_answer
from millrace.serve.http.queries import check_query
from millrace.serve.served_models import ServedModel
from millrace.serve.sessions import store
from millrace.serve.state import STATE, FrontState
from millrace.serve.tenancy.cache_scope import SALT_HEADER, salted, shares_prefixes
from millrace.serve.tenancy.keyring import DEFAULT_TENANT, Tenant
from millrace.serve.tenancy.owner import is_operator, tenant_of

ERASE_S, LOOK_S = 60.0, 0.05


class TenantForgotten(msgspec.Struct, kw_only=True):
    """What there was, and is no longer."""

    tenant: str
    object: Literal["tenant.forgotten"] = "tenant.forgotten"
    requests: int
    """That were open and have been cancelled."""
    sessions: int
    handles: int
    blocks: dict[str, int]
    """KV blocks by location."""
    shares_prefixes: bool
    """True if the tenant's prefixes are those of all tenants: they belong to nobody alone, and stay."""


async def forget(request: web.Request) -> web.Response:
    if not is_operator(request):
        raise Forbidden("Only an operator may forget a tenant; use an operator's key.")
    check_query(request, ())
    state, name = request.app[STATE], request.match_info["tenant"]
    if not name or "\0" in name:
        raise BadRequest("The path names no tenant: DELETE /v1/tenants/NAME/cache.", param="tenant")
    salt = _gateway_salt(request, state)
    loaded = _loaded(state)
    num_sessions = await state.store.run(store.forget, name)
    found = await asyncio.gather(*(_forget_in(model, name, salt) for model in loaded))
    # A turn that ended meanwhile may have been kept.
    num_sessions += await state.store.run(store.forget, name)
    blocks: Counter[str] = Counter()
    for one in found:
        blocks.update(one.blocks)
    tenant = state.keyring.named(name) if state.keyring is not None else Tenant(name=name)
    answer = TenantForgotten(
        tenant=name,
        requests=sum(one.requests for one in found),
        sessions=num_sessions,
        handles=sum(one.handles for one in found),
        blocks=dict(blocks),
        shares_prefixes=shares_prefixes(tenant, is_default=state.config.server.share_prefixes),
    )
    return json_answer(request, answer)


def _loaded(state: FrontState) -> list[ServedModel[FrontState]]:
    """The models that have an engine. One that has none keeps nothing but what is on its disk."""
    loaded = [model for model in state.models if model.client.ready is not None and model.client.failure is None]
    absent = [model.name for model in state.models if model not in loaded]
    if absent and state.config.memory.kv_disk:
        raise Conflict(
            f"The model {absent[0]!r} is not loaded, so what its disk has of the tenant cannot be erased, and nothing"
            f" was. Load it (POST /v1/models/{absent[0]}/load) and try again."
        )
    return loaded


def _gateway_salt(request: web.Request, state: FrontState) -> str:
    """Under which a gateway keeps the tenant's prefixes here."""
    if SALT_HEADER not in request.headers:
        return ""
    if state.keyring is not None:
        raise NotImplementedYet(
            "A gateway and its replicas have API keys, so what a tenant of the gateway has at the replica cannot be"
            " told from what others have. Let the replica have --gateway-key instead of keys."
        )
    if tenant_of(request) is DEFAULT_TENANT:
        raise Forbidden("The replica does not trust the gateway; start both with the same --gateway-key.")
    salt = request.headers[SALT_HEADER]
    salted(salt, "")  # Raises if it is none.
    return salt


async def _forget_in(model: ServedModel[FrontState], tenant: str, salt: str) -> ForgottenTenant:
    found = await _ask(model, "forget", tenant, salt)
    until = time.monotonic() + ERASE_S
    while not found.is_erased:
        if time.monotonic() > until:
            raise EngineUnavailable(
                f"Nothing of the tenant is found any longer, but the disk of {model.name!r} is still erasing. Send the"
                " request again to wait for it."
            )
        await asyncio.sleep(LOOK_S)
        found = await _ask(model, "forgotten", tenant)
    if found.failure:
        raise MillraceError(
            f"Nothing of the tenant is found any longer, but the disk of {model.name!r} could not be erased:"
            f" {found.failure}. Try again, or stop the server and delete the directory of --kv-disk."
        )
    return found


async def _ask(
    model: ServedModel[FrontState], kind: Literal["forget", "forgotten"], tenant: str, salt: str = ""
) -> ForgottenTenant:
    reply = await model.client.query(kind, "", tenant, salt)
    if not reply:
        raise EngineUnavailable(f"The engine of {model.name!r} was replaced meanwhile; send the request again.")
    return msgspec.json.decode(reply, type=ForgottenTenant)
