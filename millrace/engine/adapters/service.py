"""The adapters of an engine as its loop sees them: requests held and released, questions answered, files watched."""

from __future__ import annotations

import logging
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path

import msgspec

from millrace.engine.adapters.canaries import Canaries
from millrace.engine.adapters.requests import AdaptedRequests, Failed, unknown_adapter
from millrace.engine.adapters.store import Known, check_name
from millrace.engine.adapters.watch import Found, Signature, scan
from millrace.engine.figures.shares import Shares
from millrace.errors import AdapterError
from millrace.link.adapter_messages import AdapterAnswer, AdapterFigures, AddAdapter, AddCanary
from millrace.link.engine_stats import AdapterStats, TenantFigures
from millrace.link.messages import Finish, Query, Reply
from millrace.params.classes import FinishReason
from millrace.params.sampling import SamplingParams
from millrace.plan.request import Request

log = logging.getLogger(__name__)

SCAN_EVERY_S = 2.0


@dataclass(frozen=True, slots=True)
class _Adding:
    """An answer that waits until the adapter was read."""

    query: Query
    known: Known
    canary: AddCanary | None = None
    """It is to be a canary."""
    is_told: bool = False
    """See `AddAdapter`."""


class EngineAdapters:
    def __init__(
        self,
        requests: AdaptedRequests,
        shares: Callable[[], Shares],
        folder: Path | None = None,
        *,
        allows_adding: bool = True,
        canaries: Canaries | None = None,
        on_end: Callable[[], None] = lambda: None,
    ) -> None:
        """`shares`: figures by adapter. `folder`: watched. `allows_adding`: while the engine runs. `on_end`: what is
        being read fails."""
        self._requests = requests
        self._store = requests.store
        self._shares = shares
        self._folder = folder
        self._allows_adding = allows_adding
        self._on_end = on_end
        self._adding: list[_Adding] = []
        self.canaries = canaries or Canaries()
        for known in self._store.all():
            self._store.declare(known.name, self.canaries.path_of(known.name, known.path))
        self._dropped: list[tuple[int, Reply]] = []
        self._scanned: dict[str, Signature] = {}
        self._skipped: set[str] = set()
        self._scan: Future[Found] | None = None
        self._scan_at = 0.0
        self._told = self.names()

    # -- requests --------------------------------------------------------------------------------------------------

    @property
    def is_loading(self) -> bool:
        return self._requests.is_loading

    @property
    def has_waiting(self) -> bool:
        """Requests are held back, or slots are being filled."""
        return self._requests.has_waiting

    @property
    def is_watching(self) -> bool:
        return self._folder is not None

    def hold(self, request: Request, params: SamplingParams) -> bool:
        version, has_output = None, request.num_output > 0
        if params.adapter in self._store:
            version = self.canaries.version(params.adapter, request.id, has_output=has_output)
        return self._requests.hold(request, params, version)

    def take_ready(self) -> list[tuple[Request, SamplingParams]]:
        return self._requests.take_ready() if self._requests.has_waiting else []

    def take_failed(self, now: float) -> list[tuple[Failed, bool]]:
        """(request, whether its deadline passed)"""
        late = [Failed(one, "The deadline passed while its adapter was loaded.") for one in self._requests.expired(now)]
        return [(one, False) for one in self._requests.take_failed()] + [(one, True) for one in late]

    def drop(self, request_id: int) -> Request | None:
        return self._requests.drop(request_id)

    def close(self, request_id: int, reason: FinishReason, finish: Finish | None = None) -> None:
        """The request has ended. `finish`: its figures, if it ran to its end."""
        self._requests.close(request_id)
        self.canaries.close(request_id, reason, finish)

    def shut_down(self, *, is_in_order: bool = True) -> None:
        """`is_in_order`: else the engine failed."""
        if is_in_order:
            self.canaries.stop()
        self._on_end()
        self._store.close()

    # -- files -----------------------------------------------------------------------------------------------------

    def names(self) -> tuple[str, ...]:
        return tuple(self._store.names())

    def changed_names(self) -> tuple[str, ...] | None:
        """All names, if they changed since the last call."""
        names = self.names()
        if names == self._told:
            return None
        self._told = names
        return names

    def advance(self, now: float) -> list[tuple[int, Reply]]:
        """Take over what the thread has read. Returns answers that are due, with their fronts."""
        self._watch(now)
        loaded = self._store.take_done()
        replies, self._dropped = self._dropped, []
        replies += [self._added(adding) for adding in self._adding if adding.known in loaded]
        self._adding = [adding for adding in self._adding if adding.known not in loaded]
        if loaded:
            self._requests.note_loaded(loaded)
            for known in loaded:
                if known.failure:
                    log.warning("The adapter %r cannot be used: %s", known.name, known.failure)
        return replies

    def _watch(self, now: float) -> None:
        folder = self._folder
        if folder is None:
            return
        if self._scan is None:
            if now >= self._scan_at:
                self._scan = self._store.run(lambda: scan(folder))
            return
        if not self._scan.done():
            return
        found, self._scan, self._scan_at = self._scan.result(), None, now + SCAN_EVERY_S
        for sentence in set(found.skipped) - self._skipped:
            log.warning("%s", sentence)
        self._skipped = set(found.skipped)
        for name, signature in found.adapters.items():
            if self._scanned.get(name) == signature:
                continue
            is_new = name not in self._scanned
            path = folder / name
            known = self._store.declare(name, self.canaries.path_of(name, path) if is_new else path)
            if not is_new:
                self._store.load(known)
        for name in self._scanned.keys() - found.adapters.keys():
            self._store.forget(name)
        self._scanned = found.adapters

    # -- questions -------------------------------------------------------------------------------------------------

    def answer(self, query: Query) -> Reply | None:
        """None: the answer comes from `advance`, after the fronts were told of the names that changed."""
        if query.kind == "add_adapter":
            return self._add(query)
        if query.kind == "add_canary":
            return self._add_canary(query)
        if query.kind in ("promote_canary", "abort_canary"):
            return _reply(query, self._end_canary(query.name, promotes=query.kind == "promote_canary"))
        if query.kind == "drop_adapter":
            self._dropped.append((query.front, _reply(query, self._drop(query.name))))
            return None
        return _reply(query, AdapterAnswer(self.figures()))

    def _add(self, query: Query) -> Reply | None:
        asked = msgspec.json.decode(query.name, type=AddAdapter)
        if not self._allows_adding:
            return _reply(query, AdapterAnswer(error="Adapters are not added while this server runs."))
        try:
            check_name(asked.name)
        except AdapterError as error:
            return _reply(query, AdapterAnswer(error=error.message))
        if asked.is_new and asked.name in self._store:
            message = f"There is an adapter {asked.name!r}. Remove it first, or give this one another name."
            return _reply(query, AdapterAnswer(error=message))
        path = Path(asked.path).expanduser()
        if asked.is_told:
            path = self.canaries.path_of(asked.name, path)
        known = Known(asked.name, path, is_added=True)
        self._requests.expected[asked.name] = known
        self._adding.append(_Adding(query, known, is_told=asked.is_told))
        self._store.load(known)
        return None

    def _added(self, adding: _Adding) -> tuple[int, Reply]:
        known = adding.known
        if adding.canary is not None:
            return adding.query.front, _reply(adding.query, self._start_canary(adding.canary, known))
        if self._requests.expected.get(known.name) is known:
            del self._requests.expected[known.name]
        if known.failure:
            return adding.query.front, _reply(adding.query, AdapterAnswer(error=known.failure))
        if not adding.is_told:
            self.canaries.forget(known.name)
        self._store.register(known)
        return adding.query.front, _reply(adding.query, AdapterAnswer([self._figures(known)]))

    def _drop(self, name: str) -> AdapterAnswer:
        known = self._store.get(name)
        if known is None:
            return AdapterAnswer(error=unknown_adapter(name, self._store.names()), is_unknown=True)
        figures = self._figures(known)
        self.canaries.forget(name)
        self._store.forget(name)
        return AdapterAnswer([figures])

    # -- canaries --------------------------------------------------------------------------------------------------

    def _add_canary(self, query: Query) -> Reply | None:
        asked = msgspec.json.decode(query.name, type=AddCanary)
        if not self._allows_adding:
            return _reply(query, AdapterAnswer(error="Adapters are not added while this server runs."))
        if problem := self._canary_problem(asked):
            return _reply(query, problem)
        known = Known(asked.name, Path(asked.path).expanduser(), is_added=True)
        self._adding.append(_Adding(query, known, asked))
        self._store.load(known)
        return None

    def _canary_problem(self, asked: AddCanary) -> AdapterAnswer | None:
        if asked.name not in self._store:
            return AdapterAnswer(error=unknown_adapter(asked.name, self._store.names()), is_unknown=True)
        why_not = self.canaries.why_not(asked)
        return AdapterAnswer(error=why_not) if why_not else None

    def _start_canary(self, asked: AddCanary, known: Known) -> AdapterAnswer:
        """Its files were read. Meanwhile the adapter may have been removed, or have got another canary."""
        if known.failure:
            return AdapterAnswer(error=known.failure)
        if problem := self._canary_problem(asked):
            return problem
        self.canaries.start(asked, known)
        return AdapterAnswer([self._figures(one) for one in (self._store.get(asked.name),) if one is not None])

    def _end_canary(self, name: str, *, promotes: bool) -> AdapterAnswer:
        known = self._store.get(name)
        if known is None:
            return AdapterAnswer(error=unknown_adapter(name, self._store.names()), is_unknown=True)
        old_path = str(known.path) if promotes else ""
        canary = self.canaries.end(name, "promoted" if promotes else "aborted", old_path)
        if canary is None:
            return AdapterAnswer(error=f"No canary of {name!r} is running.", is_unknown=True)
        if promotes:
            known = canary.known
            self._store.register(known)
        return AdapterAnswer([self._figures(known)])

    # -- figures ---------------------------------------------------------------------------------------------------

    def figures(self) -> list[AdapterFigures]:
        return [self._figures(known) for known in self._store.all()]

    def _figures(self, known: Known) -> AdapterFigures:
        open_requests = self._requests.slots.open_requests
        share = next((one for one in self._shares().figures() if one.name == known.name), TenantFigures(known.name))
        if known.digest in self._requests.slots.digests:
            state = "resident"
        elif self._store.loads(known):
            state = "loading"
        elif known.failure:
            state = "failed"
        else:
            state = "memory" if self._store.adapter(known) is not None else "known"
        return msgspec.convert(
            {
                "name": known.name,
                "path": str(known.path),
                "state": state,
                "max_rank": known.max_rank,
                "bytes": known.num_bytes,
                "base_model": known.base_model,
                "open_requests": open_requests.get(known.name, 0),
                "loads": known.loads,
                "failure": known.failure,
                "is_added": known.is_added,
                "requests": share.requests,
                "prompt_tokens": share.prompt_tokens,
                "output_tokens": share.output_tokens,
                "canary": self.canaries.figures(known.name),
            },
            AdapterFigures,
        )

    @property
    def stats(self) -> AdapterStats:
        requests, slots, store = self._requests, self._requests.slots, self._store
        return AdapterStats(
            slots=slots.num_slots,
            resident=len(slots.digests),
            known=len(store),
            held_requests=requests.num_held,
            host_bytes=store.held_bytes,
            loads=store.num_loads,
            fills=slots.num_fills,
            slot_evictions=slots.num_evictions,
            refused=slots.num_refused,
            slot_bytes=slots.used_bytes,
            max_slot_bytes=slots.max_bytes,
            rank_classes=slots.rank_classes(),
            host_evictions=store.num_evictions,
            each=self._shares().figures(),
            canaries=self.canaries.stats(),
        )


def _reply(query: Query, answer: AdapterAnswer) -> Reply:
    return Reply(query.query_id, msgspec.json.encode(answer))
