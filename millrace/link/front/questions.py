"""Questions to the engine that wait for their replies."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from millrace.errors import EngineUnavailable
from millrace.link.messages import Reply, ToEngine

QUERY_TIMEOUT_S = 10.0


class Questions:
    def __init__(self, send: Callable[[ToEngine], None]) -> None:
        """`send` raises if no engine could answer."""
        self._send = send
        self._open: dict[int, asyncio.Future[bytes]] = {}
        self._next_id = 0

    def new_id(self) -> int:
        query_id, self._next_id = self._next_id, self._next_id + 1
        return query_id

    async def ask(self, make_message: Callable[[int], ToEngine], timeout_s: float = QUERY_TIMEOUT_S) -> bytes:
        """`make_message` is given the id that the reply will have."""
        query_id = self.new_id()
        reply = self._open[query_id] = asyncio.get_running_loop().create_future()
        try:
            self._send(make_message(query_id))
            return await asyncio.wait_for(reply, timeout_s)
        except TimeoutError:
            raise EngineUnavailable(f"The engine did not answer within {timeout_s:g} s; try again later.") from None
        finally:
            del self._open[query_id]

    def answer(self, reply: Reply) -> bool:
        """False if nobody waits for this reply."""
        waiting = self._open.get(reply.query_id)
        if waiting is None or waiting.done():
            return False
        waiting.set_result(reply.body)
        return True

    def fail(self, message: str) -> None:
        """The engine is gone."""
        for waiting in self._open.values():
            if not waiting.done():
                waiting.set_exception(EngineUnavailable(message))
