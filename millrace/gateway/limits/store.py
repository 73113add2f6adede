"""What several gateways share: open requests, tokens of the last minute, and money owed, by tenant."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import msgspec

WINDOW_S = 60
LEASE_S = 15.0
"""Open requests of a gateway that was not heard of for this long do not count: it died."""
HOUR_S = 3600.0


class StoreLost(Exception):
    """The store did not answer, or could not write."""


class Demand(msgspec.Struct, frozen=True):
    tenant: str
    tokens: int
    max_open: int
    """0: no limit, as in the next one."""
    tokens_per_minute: int


@dataclass(frozen=True, slots=True)
class Verdict:
    """`is_admitted`, or what stands against it: the open requests, or the tokens spent and the wait."""

    is_admitted: bool
    second: int = 0
    """Where the tokens were booked."""
    num_open: int = 0
    spent: int = 0
    wait_s: int = 0


class LimitStore(Protocol):
    """Every method is one atomic change. All raise `StoreLost`."""

    async def reserve(self, demand: Demand) -> Verdict: ...

    async def release(self, tenant: str, second: int, refund: int) -> None:
        """The request has ended and used `refund` tokens fewer than it had reserved (negative: more)."""

    async def owed(self, tenant: str, per_hour: float) -> float:
        """What the tenant has spent and has not been refilled."""

    async def spend(self, tenant: str, amount: float, per_hour: float) -> None: ...

    async def beat(self) -> None:
        """Renew the lease of this gateway's open requests."""

    async def close(self) -> None: ...


def verdict(demand: Demand, num_open: int, slots: list[tuple[int, int]], second: int) -> Verdict:
    """`slots`: seconds and the tokens spent in them, those of the last minute only, in order of time."""
    if demand.max_open and num_open >= demand.max_open:
        return Verdict(False, second, num_open=num_open)
    spent = sum(tokens for _, tokens in slots)
    if not demand.tokens_per_minute or spent + demand.tokens <= demand.tokens_per_minute:
        return Verdict(True, second)
    excess = spent + demand.tokens - demand.tokens_per_minute
    wait_s = WINDOW_S
    for when, tokens in slots:
        excess -= tokens
        if excess <= 0:
            wait_s = when + WINDOW_S - second
            break
    return Verdict(False, second, spent=spent, wait_s=max(1, wait_s))


def boot_id() -> str:
    """Names the run of this machine: its monotonic clock starts anew with each."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return ""
