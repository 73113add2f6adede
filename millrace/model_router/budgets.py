"""What each tenant may spend per hour: a bucket that refills steadily and may be overdrawn by requests under way."""

from __future__ import annotations

import math
from collections.abc import Mapping

HOUR_S = 3600.0
MAX_TENANTS = 100_000


class Budgets:
    def __init__(self, per_hour: float, by_tenant: Mapping[str, float]) -> None:
        self._per_hour, self._by_tenant = per_hour, by_tenant
        self.spent: dict[str, tuple[float, float]] = {}
        """By tenant: what was spent and has not been refilled, and when that was computed."""

    def limit(self, tenant: str) -> float:
        return self._by_tenant.get(tenant, self._per_hour)

    def left(self, tenant: str, now: float) -> float:
        limit = self.limit(tenant)
        return limit if math.isinf(limit) else limit - self._owed(tenant, now)

    def know(self, tenant: str, owed: float, now: float) -> None:
        """A store that several routers share says what the tenant has spent and has not been refilled."""
        if not math.isinf(self.limit(tenant)):
            self.spent[tenant] = owed, now

    def spend(self, tenant: str, amount: float, now: float) -> None:
        if math.isinf(self.limit(tenant)):
            return
        if tenant not in self.spent and len(self.spent) >= MAX_TENANTS:
            self.spent = {name: one for name, one in self.spent.items() if self._owed(name, now) > 0}
        self.spent[tenant] = self._owed(tenant, now) + amount, now

    def _owed(self, tenant: str, now: float) -> float:
        amount, when = self.spent.get(tenant, (0.0, now))
        return max(0.0, amount - self.limit(tenant) * max(0.0, now - when) / HOUR_S)
