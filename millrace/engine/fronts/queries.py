"""Answers to what fronts ask about requests, steps and kept prefixes."""

from __future__ import annotations

import logging
from collections.abc import Callable

import msgspec

from millrace.engine.explain import explain
from millrace.engine.figures.step_figures import StepFigures
from millrace.engine.fronts.forgetting import Forgetting
from millrace.engine.fronts.transfers import Transfers
from millrace.engine.ledger import Ledger
from millrace.link.block_parts import PartAnswer, PartOfPrefix
from millrace.link.messages import Query
from millrace.plan.planner.protocol import Planner

log = logging.getLogger(__name__)


class Queries:
    def __init__(
        self,
        planner: Planner,
        ledger: Ledger,
        figures: StepFigures,
        transfers: Transfers | None,
        forgetting: Forgetting,
        *,
        clock: Callable[[], float],
        cancel: Callable[[int], None],
    ) -> None:
        """`cancel`: ends a running request."""
        self._planner = planner
        self._ledger = ledger
        self._figures = figures
        self._transfers = transfers
        self._forgetting = forgetting
        self._clock = clock
        self._cancel = cancel

    def answer(self, query: Query) -> bytes:
        """Empty: there is nothing of that name."""
        planner, owner, now = self._planner, query.tenant or "", self._clock()
        if query.kind == "steps":
            return msgspec.json.encode(self._figures.last_steps(int(query.name)))
        if query.kind == "handles":
            return msgspec.json.encode(planner.handles(query.tenant, now))
        if query.kind == "block_map":
            found = planner.block_map(int(query.name), now)
            return b"" if found is None else msgspec.json.encode(found)
        if query.kind == "drop_handles":
            return msgspec.json.encode(planner.drop_handles(query.name, query.tenant))
        if query.kind == "renew_handle":
            return msgspec.json.encode(planner.renew_handle(query.name, owner, float(query.value), now))
        if query.kind == "copy_handle":
            return msgspec.json.encode(planner.copy_handle(query.name, owner, query.value, now))
        if query.kind in ("forget", "forgotten"):
            return self._forgetting.answer(query)
        if query.kind == "prefix_facts":
            facts = None if self._transfers is None else self._transfers.facts(query.name, owner, now)
            return b"" if facts is None else msgspec.msgpack.encode(facts)
        return self._of_request(query, now)

    def _of_request(self, query: Query, now: float) -> bytes:
        entries = self._ledger.named(query.name, query.tenant)
        if not entries:
            return b""
        if query.kind == "explain":
            # A client may reuse a name: explain the latest request that has it.
            return msgspec.json.encode(explain([one for one in entries if one.names == entries[-1].names], now))
        running = [entry for entry in entries if entry.finish is None]
        for request_id in [one for entry in running for one in self._ledger.cancel(entry)]:
            self._cancel(request_id)
        return msgspec.json.encode(
            {"object": "request.cancelled", "id": query.name, "cancelled": bool(running), "sequences": len(running)}
        )

    def transfer(self, part: PartOfPrefix) -> bytes:
        return msgspec.msgpack.encode(self._transferred(part))

    def _transferred(self, part: PartOfPrefix) -> PartAnswer:
        if self._transfers is None:
            return PartAnswer("This model has no KV cache.")
        self._planner.run_deferred()
        try:
            return self._transfers.answer(part, self._clock())
        except Exception as error:
            log.exception("a part of a prefix could not be read or written")
            return PartAnswer(f"The blocks could not be copied: {error}")
