"""The other fronts of the same server.

Each front also listens on a Unix socket in the server's directory. A front that is asked about the whole server asks
its siblings there for their part.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping
from dataclasses import dataclass

from aiohttp import ClientError, ClientSession, ClientTimeout, UnixConnector, web

ASK_TIMEOUT_S = 1.0


def socket_path(directory: str, front_index: int) -> str:
    return os.path.join(directory, f"http-{front_index}")


def is_for_sibling(request: web.Request) -> bool:
    """True for an internal request by a sibling front, which wants this front's part only."""
    return request.query.get("front") == "own"


@dataclass(frozen=True, slots=True)
class Siblings:
    directory: str | None
    """Where the sockets are; None: there are no siblings."""
    front_index: int
    num_fronts: int

    async def get(self, path: str, headers: Mapping[str, str] | None = None) -> dict[int, bytes]:
        """The siblings' answers at this path by front index, without those that do not answer in time."""
        return await self._ask("GET", path, headers)

    async def delete(self, path: str, headers: Mapping[str, str]) -> dict[int, bytes]:
        """The answers of those that had something to delete."""
        return await self._ask("DELETE", path, headers)

    async def _ask(self, method: str, path: str, headers: Mapping[str, str] | None) -> dict[int, bytes]:
        directory = self.directory
        if directory is None:
            return {}
        others = [index for index in range(self.num_fronts) if index != self.front_index]
        sockets = (socket_path(directory, index) for index in others)
        answers = await asyncio.gather(*(_ask(socket, method, path, headers) for socket in sockets))
        return {index: answer for index, answer in zip(others, answers, strict=True) if answer is not None}


async def _ask(socket: str, method: str, path: str, headers: Mapping[str, str] | None) -> bytes | None:
    try:
        async with (
            ClientSession(connector=UnixConnector(socket), timeout=ClientTimeout(total=ASK_TIMEOUT_S)) as session,
            session.request(
                method, f"http://front{path}{'&' if '?' in path else '?'}front=own", headers=headers
            ) as answer,
        ):
            return await answer.read() if answer.status == 200 else None
    except (ClientError, OSError, TimeoutError):
        return None  # Not running; the metric `fronts_up` shows it.
