"""The fronts of one server among themselves: each also listens on a Unix socket in the server's own directory, where
the one that is asked about all of them asks the others for their part."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping

from aiohttp import ClientError, ClientSession, ClientTimeout, UnixConnector, web

from millrace.observe.merge import merge
from millrace.serve.state import FrontState

ASK_TIMEOUT_S = 1.0


def socket_path(directory: str, front_index: int) -> str:
    return os.path.join(directory, f"http-{front_index}")


def is_for_sibling(request: web.Request) -> bool:
    """Whether another front asks for this one's part alone."""
    return request.query.get("front") == "own"


async def all_metrics(state: FrontState) -> bytes:
    """Every front's counters in one page, and the engine's once."""
    metrics, own = state.metrics, state.client.front_index
    pages = {own: metrics.own_part(), **await parts_of_siblings(state, "/metrics")}
    metrics.fronts_up.set(len(pages))
    return (merge(pages) if state.config.server.fronts > 1 else pages[own]) + metrics.engine_part()


async def parts_of_siblings(state: FrontState, path: str, headers: Mapping[str, str] | None = None) -> dict[int, bytes]:
    """What the other fronts answer at this path, by their numbers; without those that do not answer in time."""
    own, directory = state.client.front_index, state.directory
    if directory is None:
        return {}
    others = [index for index in range(state.config.server.fronts) if index != own]
    answers = await asyncio.gather(*(_part_of(directory, index, path, headers) for index in others))
    return {index: answer for index, answer in zip(others, answers, strict=True) if answer is not None}


async def _part_of(directory: str, front_index: int, path: str, headers: Mapping[str, str] | None) -> bytes | None:
    try:
        connector = UnixConnector(socket_path(directory, front_index))
        async with (
            ClientSession(connector=connector, timeout=ClientTimeout(total=ASK_TIMEOUT_S)) as session,
            session.get(f"http://front{path}?front=own", headers=headers) as answer,
        ):
            return await answer.read() if answer.status == 200 else None
    except (ClientError, OSError, TimeoutError):
        return None  # It is not there; the number of fronts that are says so.
