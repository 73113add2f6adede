"""The models of one server as a front knows them: by name and alias, each with the client of its engine.

A model's tokenizer and template are read when a request first names it, in a thread, once.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections.abc import Callable, Iterator
from typing import Generic, Literal, TypeVar

from millrace.errors import MillraceError, ModelNotFound
from millrace.link.client import EngineClient
from millrace.serve.created_models import CreatedModel, CreatedModels
from millrace.sources.file_facts import FileFacts, file_facts

State = TypeVar("State")
Status = Literal["loaded", "loading", "unloaded", "failed"]
MAX_NAMES_SHOWN = 20


def loading_state(name: str, client: EngineClient) -> str:
    stage = client.loading
    done = f" ({stage.what}, {100 * stage.done // stage.total} %)" if stage is not None and stage.total else ""
    return f"The model {name!r} is still loading{done}"


def as_asked(message: str, name: str, asked: str | None) -> str:
    """The message with the model called as the client called it, which may be an alias."""
    return message.replace(repr(name), repr(asked)) if asked else message


def _anything(names: tuple[str, ...]) -> bool:
    return True


class ServedModel(Generic[State]):
    """`state` is what requests to this model need, or a function that reads it from the model's files."""

    def __init__(
        self,
        name: str,
        client: EngineClient,
        state: State | None = None,
        *,
        read: Callable[[], State] | None = None,
        aliases: tuple[str, ...] = (),
        source: str = "",
        loads_at_start: bool = True,
        keep_alive_s: float = -1.0,
    ) -> None:
        self.name = name
        self.aliases = aliases
        self.client = client
        self.state = state
        self.source = source
        """As the settings name the model's files."""
        self.loads_at_start = loads_at_start
        self.keep_alive_s = keep_alive_s
        """Seconds after its last request after which it is unloaded; negative: never."""
        self._read = read
        self._facts: FileFacts | None = None
        self._reading: asyncio.Future[State] | None = None

    async def when_read(self) -> State:
        """The state. Requests that come while it is being read wait for the same reading."""
        if self.state is not None:
            return self.state
        if self._reading is None:
            assert self._read is not None
            self._reading = asyncio.ensure_future(asyncio.to_thread(self._read))
            self._reading.add_done_callback(self._on_read)
        return await asyncio.shield(self._reading)

    def _on_read(self, reading: asyncio.Future[State]) -> None:
        self._reading = None  # After a failure, such as a file that cannot be read, the next request tries again.
        if not reading.cancelled() and reading.exception() is None:
            self.state = reading.result()

    async def file_facts(self) -> FileFacts:
        """What the model's files say of it, loaded or not; nothing if they cannot be read."""
        if self._facts is None and self.source:
            with contextlib.suppress(MillraceError, OSError, ValueError):
                self._facts = await asyncio.to_thread(file_facts, self.source)
        return self._facts or FileFacts()

    @property
    def status(self) -> Status:
        client = self.client
        if client.failure is not None:
            return "failed"
        if client.ready is not None:
            return "loaded"
        return "unloaded" if client.is_unloaded and not client.is_wanted else "loading"

    def unusable_because(self) -> str | None:
        """Why a request to this model would fail now; None if it would not, or would first load the model."""
        client = self.client
        if client.failure is not None:
            return client.failure
        if client.ready is not None and not client.is_progressing(time.monotonic()):
            return f"The engine of {self.name!r} has requests but completes no steps."
        return None

    async def expires_in_s(self) -> float:
        """Seconds until the model is unloaded if no request comes; infinite if it stays."""
        if self.keep_alive_s < 0 or self.client.ready is None:
            return math.inf
        idleness = await self.client.retire(math.inf)
        return max(0.0, self.keep_alive_s - idleness.idle_s)


class ServedModels(Generic[State]):
    def __init__(self, created: CreatedModels | None = None) -> None:
        """`created`: models that clients made of these."""
        self.created = created or CreatedModels()
        self._models: list[ServedModel[State]] = []
        self.by_name: dict[str, ServedModel[State]] = {}

    def __len__(self) -> int:
        return len(self._models)

    def __iter__(self) -> Iterator[ServedModel[State]]:
        return iter(self._models)

    def add(self, model: ServedModel[State]) -> None:
        self._models.append(model)
        for name in (model.name, *model.aliases):
            self.by_name.setdefault(name, model)

    def names_of(self, model: ServedModel[State], adapter: str = "") -> tuple[str, ...]:
        """All names that requests may give for a model, or for its adapter."""
        own = (model.name, *model.aliases)
        if not adapter:
            return own
        alone = () if adapter in self.by_name else (adapter,)
        return (*(f"{name}:{adapter}" for name in own), *alone)

    def listed(
        self, may_use: Callable[[tuple[str, ...]], bool] = _anything
    ) -> list[tuple[ServedModel[State], str, str]]:
        """(model, name, adapter) of all names that requests may give: models, their aliases, their adapters, and what
        was made of them. `may_use`: see `Tenant.may_use`."""
        found, created = [], self.created.all()
        for model in self._models:
            found += [(model, name, "") for name in (model.name, *model.aliases)]
            made = [one for one in created if one.model == model.name and self._can_answer(model, one)]
            own = {one.adapter for one in made if one.digests}
            adapters = (adapter for adapter in model.client.adapters.names or () if adapter not in own)
            found += [(model, f"{model.name}:{adapter}", adapter) for adapter in adapters]
            found += [(model, one.name, one.adapter) for one in made]
        return [one for one in found if may_use((one[1], *self.names_of(one[0], one[2])))]

    def serves(self, name: str) -> bool:
        """Whether this is the name or an alias of a served model."""
        return name in self.by_name

    def made(self, name: str) -> CreatedModel | None:
        """What clients made under this name, if its model is served here and no served model has the name."""
        one = None if self.serves(name) else self.created.get(name)
        return one if one is not None and self.serves(one.model) else None

    @staticmethod
    def _can_answer(model: ServedModel[State], made: CreatedModel) -> bool:
        """A model that was never loaded has no list of adapters."""
        adapters = model.client.adapters.names
        return not made.adapter or made.adapter in (adapters or ()) or (adapters is None and model.client.ready is None)

    def find(self, name: str) -> ServedModel[State]:
        found = self.by_name.get(name)
        if found is None and (adapted := self._adapter_of(name)) is not None:
            found = adapted[0]
        if found is None:
            raise ModelNotFound(
                f"The model {name[:200]!r} is not served here; this server serves {self.shown()}.", param="model"
            )
        return found

    def knows(self, name: str) -> bool:
        return name in self.by_name or self._adapter_of(name) is not None

    def with_adapter(self, name: str) -> tuple[ServedModel[State], str]:
        """The model, and the adapter that the name asks for; empty for the model itself. Names of adapters may stand
        alone, or behind their model's name and a colon."""
        return self._adapter_of(name) or (self.find(name), "")

    def _adapter_of(self, name: str) -> tuple[ServedModel[State], str] | None:
        if name in self.by_name:
            return None
        if (made := self.made(name)) is not None:
            return self.by_name[made.model], made.adapter
        base, colon, adapter = name.partition(":")
        while colon:
            model = self.by_name.get(base)
            if model is not None and adapter in (model.client.adapters.names or ()):
                return model, adapter
            more, colon, adapter = adapter.partition(":")
            base = f"{base}:{more}"
        return next(((model, name) for model in self._models if name in (model.client.adapters.names or ())), None)

    def shown(self) -> str:
        """The first names, for messages."""
        own = [name for model, name, _ in self.listed() if name == model.name or name not in model.aliases]
        names = [repr(name) for name in own[:MAX_NAMES_SHOWN]]
        further = len(own) - len(names)
        return ", ".join(names) + (f" and {further} more" if further else "")
