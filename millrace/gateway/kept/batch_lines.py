"""The models that a batch asks for: its lines run at a replica, which does not know what the gateway's keys may use."""

from __future__ import annotations

import asyncio
from urllib.parse import quote

import msgspec
from aiohttp import web

from millrace.errors import EngineUnavailable
from millrace.gateway.kept.finding import replica_headers
from millrace.gateway.state import GatewayState
from millrace.gateway.upstream import LOST
from millrace.serve.tenancy.owner import tenant_of


class _Asked(msgspec.Struct):
    model: str = ""


class _Line(msgspec.Struct):
    body: _Asked = msgspec.field(default_factory=_Asked)


async def check_lines(state: GatewayState, request: web.Request, home: str, stored: str) -> None:
    """Raises Forbidden for the first line with a model that the tenant may not use. `stored`: the input file at `home`;
    a file that no replica has is refused there."""
    tenant = tenant_of(request)
    if tenant.models is None or home not in state.fleet.replicas:
        return
    replica = state.fleet.replicas[home]
    url = f"{replica.settings.url}/v1/files/{quote(stored.rpartition('/')[2], safe='')}/content"
    try:
        async with (
            asyncio.timeout(state.settings.answer_s),
            state.session.get(url, headers=replica_headers(state, request)) as answer,
        ):
            if answer.status == 404:
                return
            lines = (await answer.read()).split(b"\n") if answer.status == 200 else None
    except LOST:
        lines = None
    if lines is None:
        raise EngineUnavailable("The models of the batch's lines could not be checked; send it again.")
    for model in {_model_in(line) for line in lines if line.strip()}:
        state.check_model(tenant, model)


def _model_in(line: bytes) -> str:
    """The replica refuses a line that is none."""
    try:
        return msgspec.json.decode(line, type=_Line).body.model
    except (msgspec.DecodeError, RecursionError):
        return ""
