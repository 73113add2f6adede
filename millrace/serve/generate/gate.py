"""The gate between a translated request and the engine: priority, deadline, quotas and admission control.

Every dialect goes through it, so all have the same limits.
"""

from __future__ import annotations

import dataclasses
import math
import time

import msgspec
from aiohttp import web

from millrace.errors import BadRequest, Forbidden, Overloaded
from millrace.link.caller import Caller
from millrace.params.classes import CLASS_NAMES
from millrace.serve.generate.fields.priority import STANDARD
from millrace.serve.generate.generation import Generation
from millrace.serve.generate.prompts import check_writes
from millrace.serve.http.app_keys import ADAPTER, REQUEST_ID
from millrace.serve.state import FrontState
from millrace.serve.tenancy.cache_scope import SALT_HEADER, salted, scope_of
from millrace.serve.tenancy.keyring import DEFAULT_TENANT, Tenant, check_may_use
from millrace.serve.tenancy.owner import tenant_of
from millrace.serve.tenancy.quotas import Limited, Reservations, reserve_all

TIMEOUT_HEADER = "X-Request-Timeout"
"""Seconds until the deadline; the smaller of this and the body's `timeout` applies."""
SLO_RETRY_S = 60.0
EXPECTED_OUTPUT_TOKENS = 256
"""Tokens reserved for an answer without `max_tokens`."""


def enter(
    state: FrontState, request: web.Request, generation: Generation, received: float
) -> tuple[Generation, Reservations]:
    """The request as it will be submitted, and its reservation of the tenant's quotas until it ends."""
    if state.adapter:
        request[ADAPTER] = (state.model_name, state.adapter)
    if not generation.params.pooling:
        check_writes(state)
    tenant = tenant_of(request)
    salt = salted(request.headers.get(SALT_HEADER, ""), generation.cache_salt)
    generation = dataclasses.replace(generation, cache_salt=salt)
    generation = _for_tenant(state, generation, tenant, request[REQUEST_ID], received)
    deadline = min(generation.deadline, header_deadline(request, received))
    num_sequences = len(generation.prompts) * generation.num_sequences
    client = state.client
    try:
        _check_budgets(state, generation.priority)
        state.admission.check(client.stats, client.num_unreported, generation.priority, num_sequences)
        reservation = reserve_all(state.quotas, _limited(state, tenant), _tokens_of(generation), time.time())
    except Exception:
        state.metrics.count_refusal(state.model_name, CLASS_NAMES[generation.priority])
        raise
    return dataclasses.replace(generation, deadline=deadline), reservation


def _check_budgets(state: FrontState, priority: int) -> None:
    """With `slo_admission`, batch requests are refused while a more urgent class misses its objectives."""
    if not state.config.observe.slo_admission or priority != CLASS_NAMES.index("batch"):
        return
    for objective in state.figures.slos.burning(time.time()):
        if objective.priority != priority:
            raise Overloaded(
                f"The error budget of '{objective}' burns fast, so batch requests are refused for now. Retry in"
                f" {SLO_RETRY_S:.0f} s.",
                retry_after_s=SLO_RETRY_S,
            )


def enter_unattended(
    state: FrontState, owner: str, request_id: str, generation: Generation, received: float, salt: str = ""
) -> tuple[Generation, Reservations]:
    """The same for a line of a batch or a background response. It may wait as long as necessary, so admission control
    does not apply. `salt`: what a gateway sent with it, which keeps its tenants' prefixes apart."""
    if not generation.params.pooling:
        check_writes(state)
    if state.keyring is not None:
        tenant = state.keyring.named(owner)
    else:  # An owner was named by a gateway. Its prefixes are apart by the salt, or else by its name.
        tenant = Tenant(name=owner, private_cache=not salt) if owner else DEFAULT_TENANT
    generation = dataclasses.replace(generation, cache_salt=salted(salt, generation.cache_salt))
    generation = _for_tenant(state, generation, tenant, request_id, received)
    return generation, reserve_all(state.quotas, _limited(state, tenant), _tokens_of(generation), time.time())


def _for_tenant(
    state: FrontState, generation: Generation, tenant: Tenant, request_id: str, received: float
) -> Generation:
    check_may_use(tenant, state.names, state.answers_as)
    names = (request_id, generation.answer_id)
    weight = tenant.weight if state.keyring is None else state.keyring.weight_of(tenant, state.names)
    caller = Caller(tenant=tenant.name, weight=weight, names=names, received=received)
    salt = scope_of(tenant, generation.cache_salt, share_prefixes=state.config.server.share_prefixes)
    priority = _class_of(tenant, generation.asked_priority)
    retain = generation.retain
    if retain is not None:
        retain = msgspec.structs.replace(retain, max_bytes=tenant.cache_mib << 20)
    return dataclasses.replace(generation, caller=caller, cache_salt=salt, priority=priority, retain=retain)


def _limited(state: FrontState, tenant: Tenant) -> list[Limited]:
    """The tenant, and the model if it has limits."""
    return [tenant] if state.keyring is None else [tenant, *state.keyring.limits_of(state.names)]


def _class_of(tenant: Tenant, asked: int | None) -> int:
    """The class that was named, or the usual one, or a less urgent one if the tenant may have no other."""
    most_urgent = CLASS_NAMES.index(tenant.most_urgent)
    if asked is None:
        return max(STANDARD, most_urgent)
    if asked < most_urgent:
        raise Forbidden(
            f"Tenant {tenant.name!r} may ask for priority {tenant.most_urgent!r} at most, not {CLASS_NAMES[asked]!r}.",
            param="priority",
        )
    return asked


def _tokens_of(generation: Generation) -> int:
    """Upper bound on the tokens of the request, as far as it sets one."""
    output = generation.params.max_tokens if generation.params.max_tokens is not None else EXPECTED_OUTPUT_TOKENS
    prompt = sum(len(prompt.token_ids) for prompt in generation.prompts)
    return prompt + output * len(generation.prompts) * generation.num_sequences


def header_deadline(request: web.Request, received: float) -> float:
    text = request.headers.get(TIMEOUT_HEADER)
    if text is None:
        return math.inf
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not (math.isfinite(seconds) and seconds > 0):
        raise BadRequest(
            f"The header {TIMEOUT_HEADER} is {text[:80]!r}; send a positive number of seconds.", param=TIMEOUT_HEADER
        )
    return received + seconds
