"""The fronts of one server among themselves: each also listens on a Unix socket in the server's own directory, where
the one that is scraped asks the others for their part."""

from __future__ import annotations

import asyncio
import os

from aiohttp import ClientError, ClientSession, ClientTimeout, UnixConnector

from millrace.observe.merge import merge
from millrace.serve.state import FrontState

ASK_TIMEOUT_S = 1.0
OWN_PART = "/metrics?front=own"


def socket_path(directory: str, front_index: int) -> str:
    return os.path.join(directory, f"http-{front_index}")


async def all_metrics(state: FrontState) -> bytes:
    """Every front's counters in one page, and the engine's once."""
    metrics, own = state.metrics, state.client.front_index
    others = [i for i in range(state.config.server.fronts) if i != own] if state.directory is not None else []
    answers = await asyncio.gather(*(_metrics_of(state.directory or "", index) for index in others))
    pages = {own: metrics.own_part()}
    pages.update({index: page for index, page in zip(others, answers, strict=True) if page is not None})
    metrics.fronts_up.set(len(pages))
    return (merge(pages) if others else pages[own]) + metrics.engine_part()


async def _metrics_of(directory: str, front_index: int) -> bytes | None:
    try:
        connector = UnixConnector(socket_path(directory, front_index))
        async with (
            ClientSession(connector=connector, timeout=ClientTimeout(total=ASK_TIMEOUT_S)) as session,
            session.get(f"http://front{OWN_PART}") as answer,
        ):
            return await answer.read() if answer.status == 200 else None
    except (ClientError, OSError, TimeoutError):
        return None  # It is not there; the number of fronts that are says so.
