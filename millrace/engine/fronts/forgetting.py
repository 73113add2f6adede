"""Forgets tenants: their requests end, and their handles and own KV blocks are gone wherever they were."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from millrace.engine.copies import PendingCopy
from millrace.engine.disk.copier import DiskCopier
from millrace.engine.ledger import Ledger
from millrace.link.forgotten import ForgottenTenant
from millrace.link.messages import Query
from millrace.params.classes import FinishReason
from millrace.plan.planner.protocol import Planner

FORGOTTEN = "The request's tenant was forgotten by the operator."
Abort = Callable[[int, FinishReason, str], None]


class Forgetting:
    def __init__(self, scheduler: Planner, ledger: Ledger, disk: DiskCopier | None, abort: Abort) -> None:
        self._scheduler = scheduler
        self._ledger = ledger
        self._disk = disk
        self._abort = abort
        self._last: dict[str, tuple[ForgottenTenant, PendingCopy]] = {}
        """By tenant whose blocks are being erased on the disk."""

    def answer(self, query: Query) -> bytes:
        tenant = query.tenant or ""
        found = self._forget(tenant, query.value) if query.kind == "forget" else self._state(tenant)
        return b"" if found is None else msgspec.json.encode(found)

    def _forget(self, tenant: str, salt: str) -> ForgottenTenant:
        open_ids = self._ledger.of_tenant(tenant)
        for request_id in open_ids:
            self._abort(request_id, "cancelled", FORGOTTEN)
        self._ledger.forget_prompts(tenant)
        dropped = self._scheduler.forget(tenant, salt)
        found = ForgottenTenant(len(open_ids), dropped.handles, dict(dropped.blocks), self._disk is None)
        if self._disk is not None:
            self._last[tenant] = found, self._disk.forget(dropped.mark)
        return found

    def _state(self, tenant: str) -> ForgottenTenant | None:
        found, pending = self._last.get(tenant, (None, None))
        if found is None or pending is None or not pending.done():
            return found
        del self._last[tenant]
        try:
            pending.wait()
        except Exception as error:
            return msgspec.structs.replace(found, is_erased=True, failure=str(error))
        return msgspec.structs.replace(found, is_erased=True)
