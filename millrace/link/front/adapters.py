"""The adapters of a front's model: which ones there are, and orders to the engine to add, drop and try them."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from millrace.errors import ModelNotFound
from millrace.link.adapter_messages import AdapterAnswer, AdapterFigures, AddAdapter, AddCanary
from millrace.link.front.known_adapters import KnownAdapters
from millrace.link.front.questions import Questions
from millrace.link.messages import AdapterQuery, Query, ToEngine

ADAPTER_TIMEOUT_S = 120.0
"""For reading an adapter's files."""
NO_ADAPTERS = "The model takes no adapters: start its server with --adapters, --adapter-dir or --allow-adapters."
MAX_NAMES_SHOWN = 20
"""Of adapters, in messages."""


class Adapters:
    def __init__(self, questions: Questions, front_index: int, send: Callable[[ToEngine], None]) -> None:
        """`send`: what needs no reply."""
        self.known = KnownAdapters()
        self._questions = questions
        self._front_index = front_index
        self._send = send

    @property
    def names(self) -> tuple[str, ...] | None:
        """Names of the adapters that requests may ask for; None if the model takes none or was never loaded."""
        return self.known.names

    def check(self, name: str) -> None:
        """Refuse the name of an adapter that there is not. Empty: the model itself."""
        if not name or name in (self.names or ()):
            return
        known = ", ".join(map(repr, (self.names or ())[:MAX_NAMES_SHOWN]))
        if self.names is None:
            known = "none: start it with --adapters NAME=PATH"
        raise ModelNotFound(f"There is no adapter {name[:200]!r}; this model has {known or 'none'}.", param="adapter")

    async def add(self, asked: AddAdapter) -> AdapterAnswer:
        """Answered when its files were read. Engines that are started later are told of it, too."""
        answer = await self._change("add_adapter", msgspec.json.encode(asked).decode())
        if not answer.error:
            self.known.note_added(asked)
        return answer

    async def drop(self, name: str) -> AdapterAnswer:
        return await self._change("drop_adapter", name)

    async def add_canary(self, asked: AddCanary) -> AdapterAnswer:
        """Answered when its files were read."""
        return await self._change("add_canary", msgspec.json.encode(asked).decode())

    async def end_canary(self, name: str, *, promotes: bool) -> AdapterAnswer:
        """Engines that are started later are told of a promoted version."""
        answer = await self._change("promote_canary" if promotes else "abort_canary", name)
        if promotes and not answer.error:
            self.known.note_added(AddAdapter(name, answer.adapters[0].path))
        return answer

    async def _change(self, kind: AdapterQuery, name: str) -> AdapterAnswer:
        def query(query_id: int) -> Query:
            return Query(self._front_index, query_id, kind, name)

        reply = await self._questions.ask(query, ADAPTER_TIMEOUT_S)
        return msgspec.json.decode(reply, type=AdapterAnswer) if reply else AdapterAnswer(error=NO_ADAPTERS)

    async def figures(self) -> list[AdapterFigures]:
        reply = await self._questions.ask(lambda query_id: Query(self._front_index, query_id, "adapters", ""))
        return msgspec.json.decode(reply, type=AdapterAnswer).adapters if reply else []

    def tell(self, names: tuple[str, ...] | None) -> None:
        """Tell a new engine, which has these, of the others. Requests that go on with it find them: it takes messages
        in order."""
        for asked in self.known.on_new_engine(names):
            query_id = self._questions.new_id()
            body = msgspec.json.encode(msgspec.structs.replace(asked, is_told=True)).decode()
            self._send(Query(self._front_index, query_id, "add_adapter", body))
            self.known.note_told(query_id, asked.name)
