"""Weighted fairness between tenants: each has a counter of the tokens it was served, over its weight; the lowest goes
next. A tenant that comes back after a pause starts at the lowest of those that are here, so nobody saves up credit."""

from __future__ import annotations

from dataclasses import dataclass

OUTPUT_COST = 2.0
"""A generated token costs a step of its own; a prompt token shares one with many."""


@dataclass(slots=True)
class Share:
    served: float = 0.0
    """Cost of what was given, over the weight."""
    num_open: int = 0


class FairShares:
    def __init__(self) -> None:
        self._shares: dict[str, Share] = {}
        self._floor = 0.0
        """The lowest counter when the last tenant left: where newcomers to an empty house start."""

    def served(self, tenant: str) -> float:
        share = self._shares.get(tenant)
        return share.served if share is not None else self._floor

    def enter(self, tenant: str) -> None:
        """A request of the tenant has come."""
        share = self._shares.get(tenant)
        if share is None:
            share = self._shares[tenant] = Share(self._lowest())
        share.num_open += 1

    def leave(self, tenant: str) -> None:
        """It has gone. Tenants without requests are forgotten, so that their number is bounded by what is open."""
        share = self._shares[tenant]
        share.num_open -= 1
        if share.num_open == 0:
            self._floor = max(self._floor, self._lowest())
            del self._shares[tenant]

    def charge(self, tenant: str, weight: float, num_prompt: float, num_output: float) -> None:
        share = self._shares.get(tenant)
        if share is not None:
            share.served += (num_prompt + OUTPUT_COST * num_output) / weight

    def _lowest(self) -> float:
        return min(share.served for share in self._shares.values()) if self._shares else self._floor
