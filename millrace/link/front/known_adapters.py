"""The adapters of a model as a front knows them, and those that it tells its next engine of."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable

import msgspec

from millrace.link.adapter_messages import AdapterAnswer, AddAdapter

log = logging.getLogger("millrace.serve")


class KnownAdapters:
    def __init__(self) -> None:
        self.names: tuple[str, ...] | None = None
        """Those that requests may ask for; None if the model takes none or was never loaded."""
        self.lasting: Callable[[], Iterable[AddAdapter]] = tuple
        """What every engine is told of, beside what was added through this front."""
        self._of_engine: tuple[str, ...] = ()
        self._added: dict[str, AddAdapter] = {}
        self._awaited: dict[int, str] = {}
        """By query: the engine was told of them and has not answered. It takes messages in order, so requests may ask
        for them already."""

    def note_added(self, asked: AddAdapter) -> None:
        """Engines that are started later are told of it, too."""
        self._added[asked.name] = asked

    def on_new_engine(self, names: tuple[str, ...] | None) -> list[AddAdapter]:
        """What to tell it of."""
        self._awaited = {}
        wanted = {asked.name: asked for asked in (*self.lasting(), *self._added.values())}
        self._of_engine, self.names = names or (), names
        if names is None and wanted:
            log.warning(
                "%s need adapters, which this server takes none of: start it with --allow-adapters.",
                ", ".join(sorted(wanted)[:20]),
            )
        return [] if names is None else list(wanted.values())

    def note_told(self, query_id: int, name: str) -> None:
        self._awaited[query_id] = name
        self._set_names()

    def on_names(self, names: tuple[str, ...]) -> None:
        for name in set(self._of_engine) - set(names):  # Removed, perhaps through another front.
            self._added.pop(name, None)
        self._of_engine = names
        self._set_names()

    def on_reply(self, query_id: int, body: bytes) -> None:
        name = self._awaited.pop(query_id, None)
        if name is None:
            return
        self._set_names()
        answer = msgspec.json.decode(body, type=AdapterAnswer) if body else AdapterAnswer()
        if answer.error:
            log.warning("The adapter %r could not be given to the engine: %s", name, answer.error)

    def _set_names(self) -> None:
        self.names = tuple(sorted({*self._of_engine, *self._awaited.values()}))
