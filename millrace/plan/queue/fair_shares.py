"""Weighted fair queueing between tenants (or adapters, with `--share-by adapter`), by virtual time: tokens served,
divided by the tenant's weight.

The tenant with the lowest virtual time goes next. A tenant that becomes active starts from the lowest virtual time of
the active tenants, so being idle earns no credit.
"""

from __future__ import annotations

from dataclasses import dataclass

OUTPUT_COST = 2.0
"""Cost of an output token in prompt tokens: it takes a step of its own."""


@dataclass(slots=True)
class Share:
    virtual_time: float = 0.0
    num_open: int = 0
    """Requests of the tenant that have not ended."""


class FairShares:
    def __init__(self) -> None:
        self._shares: dict[str, Share] = {}
        self._floor = 0.0
        """Virtual time a tenant starts from when no other tenant is active."""

    def virtual_time(self, tenant: str) -> float:
        share = self._shares.get(tenant)
        return share.virtual_time if share is not None else self._floor

    def enter(self, tenant: str) -> None:
        """A request of the tenant arrived."""
        share = self._shares.get(tenant)
        if share is None:
            share = self._shares[tenant] = Share(self._lowest())
        share.num_open += 1

    def leave(self, tenant: str) -> None:
        """A request of the tenant ended. Tenants without open requests are removed, which bounds their number."""
        share = self._shares[tenant]
        share.num_open -= 1
        if share.num_open == 0:
            self._floor = max(self._floor, self._lowest())
            del self._shares[tenant]

    def charge(self, tenant: str, weight: float, num_prompt: float, num_output: float) -> None:
        share = self._shares.get(tenant)
        if share is not None:
            share.virtual_time += (num_prompt + OUTPUT_COST * num_output) / weight

    def _lowest(self) -> float:
        return min(share.virtual_time for share in self._shares.values()) if self._shares else self._floor
