"""Quotas of each tenant across all fronts: concurrent requests, and tokens in the last minute.

Each tenant has a small file in the server's directory, memory-mapped by every front. A front writes only its own row
and reads all rows, which needs no lock; two fronts that admit at the same moment can exceed a limit by one request.
A process without such a directory counts its own requests alone.
"""

from __future__ import annotations

import hashlib
import math
import mmap
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Protocol

import numpy as np
import numpy.typing as npt

from millrace.errors import BadRequest, MillraceError, QuotaExceeded
from millrace.serve.tenancy.keyring import ModelLimits, Tenant

Limited = Tenant | ModelLimits
"""Who has limits."""

WINDOW_S = 60
_OPEN, _SECONDS, _TOKENS = 0, 1, 1 + WINDOW_S
_WIDTH = 1 + 2 * WINDOW_S


class Usage(Protocol):
    """One tenant's counters."""

    @property
    def num_open(self) -> int: ...

    def open(self, change: int) -> None: ...

    def spend(self, tokens: int, second: int) -> None: ...

    def refund(self, tokens: int, second: int) -> None:
        """Give back tokens reserved at `second`; no effect if that second has left the window."""

    def spent(self, second: int) -> int:
        """In the minute up to `second`."""

    def seconds_until_free(self, wanted: int, limit: int, second: int) -> int:
        """Seconds until `wanted` more tokens fit under `limit`, if nothing else is spent."""


class OwnUsage:
    """Of one process. No method takes longer because of earlier requests of the same second."""

    def __init__(self) -> None:
        self.num_open = 0
        self._tokens: dict[int, int] = {}
        """By second, those within the window before `_until`."""
        self._total = 0
        self._until = 0

    def open(self, change: int) -> None:
        self.num_open += change

    def spend(self, tokens: int, second: int) -> None:
        self._forget(second)
        self._tokens[second] = self._tokens.get(second, 0) + tokens
        self._total += tokens

    def refund(self, tokens: int, second: int) -> None:
        if second in self._tokens:
            self._tokens[second] -= tokens
            self._total -= tokens

    def spent(self, second: int) -> int:
        self._forget(second)
        return self._total

    def seconds_until_free(self, wanted: int, limit: int, second: int) -> int:
        self._forget(second)
        excess = self._total + wanted - limit
        if excess <= 0:
            return 1
        for when, tokens in sorted(self._tokens.items()):
            excess -= tokens
            if excess <= 0:
                return max(1, when + WINDOW_S - second)
        return WINDOW_S

    def _forget(self, second: int) -> None:
        if second == self._until:
            return
        self._until = second
        for when in [when for when in self._tokens if when <= second - WINDOW_S]:
            self._total -= self._tokens.pop(when)


class SharedUsage:
    """Of all fronts, a row for each: open requests, then 60 slots with their second and 60 with its tokens."""

    def __init__(self, cells: npt.NDArray[np.int64], front_index: int) -> None:
        self._cells = cells
        self._mine = cells[front_index]

    @property
    def num_open(self) -> int:
        return int(self._cells[:, _OPEN].sum())

    def open(self, change: int) -> None:
        self._mine[_OPEN] += change

    def spend(self, tokens: int, second: int) -> None:
        slot = second % WINDOW_S
        if self._mine[_SECONDS + slot] != second:
            self._mine[_SECONDS + slot] = second
            self._mine[_TOKENS + slot] = 0
        self._mine[_TOKENS + slot] += tokens

    def refund(self, tokens: int, second: int) -> None:
        slot = second % WINDOW_S
        if self._mine[_SECONDS + slot] == second:
            self._mine[_TOKENS + slot] -= tokens

    def spent(self, second: int) -> int:
        return int(self._tokens(second).sum())

    def seconds_until_free(self, wanted: int, limit: int, second: int) -> int:
        excess = int(self._tokens(second).sum()) + wanted - limit
        order = np.argsort(self._cells[:, _SECONDS:_TOKENS], axis=None)
        seconds = self._cells[:, _SECONDS:_TOKENS].ravel()[order]
        leaving = np.cumsum(self._tokens(second).ravel()[order])
        at = int(np.searchsorted(leaving, excess))
        return max(1, int(seconds[min(at, len(seconds) - 1)]) + WINDOW_S - second)

    def _tokens(self, second: int) -> npt.NDArray[np.int64]:
        recent = self._cells[:, _SECONDS:_TOKENS] > second - WINDOW_S
        tokens: npt.NDArray[np.int64] = np.where(recent, self._cells[:, _TOKENS:], 0)
        return tokens


class Quotas:
    def __init__(self, directory: str | None = None, num_fronts: int = 1, front_index: int = 0) -> None:
        self._directory = Path(directory) / "tenants" if directory is not None else None
        self._num_fronts = num_fronts
        self._front_index = front_index
        self._usages: dict[str, Usage] = {}
        if self._directory is not None:
            self._directory.mkdir(exist_ok=True)
            for file in self._directory.iterdir():  # A previous front of this index died with its open requests.
                self._map(file)[front_index] = 0

    def usage(self, tenant: str) -> Usage:
        if tenant not in self._usages:
            self._usages[tenant] = OwnUsage() if self._directory is None else self._shared(self._directory, tenant)
        return self._usages[tenant]

    def _shared(self, directory: Path, tenant: str) -> SharedUsage:
        return SharedUsage(self._map(directory / hashlib.sha256(tenant.encode()).hexdigest()), self._front_index)

    def _map(self, file: Path) -> npt.NDArray[np.int64]:
        size = self._num_fronts * _WIDTH * 8
        descriptor = os.open(file, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            os.ftruncate(descriptor, size)
            memory = mmap.mmap(descriptor, size)
        finally:
            os.close(descriptor)
        return np.frombuffer(memory, np.int64).reshape(self._num_fronts, _WIDTH)


class Reservation:
    """The part of its tenant's quotas that an admitted request holds until `release`."""

    __slots__ = ("_second", "_tokens", "_usage")

    def __init__(self, usage: Usage, tokens: int, second: int) -> None:
        self._usage = usage
        self._tokens = tokens
        self._second = second

    def release(self, used_tokens: int) -> None:
        self._usage.open(-1)
        if self._tokens > used_tokens:
            self._usage.refund(self._tokens - used_tokens, self._second)


class Reservations:
    """Those of one request, for its tenant and its model."""

    __slots__ = ("_held",)

    def __init__(self, held: list[Reservation]) -> None:
        self._held = held

    def release(self, used_tokens: int) -> None:
        for one in self._held:
            one.release(used_tokens)


def reserve_all(quotas: Quotas, limited: Iterable[Limited], tokens: int, now: float) -> Reservations:
    """All of them or none."""
    held: list[Reservation] = []
    try:
        held.extend(reserve(quotas, one, tokens, now) for one in limited)
    except MillraceError:
        Reservations(held).release(0)
        raise
    return Reservations(held)


def reserve(quotas: Quotas, tenant: Limited, tokens: int, now: float) -> Reservation:
    """Reserve one request and `tokens` tokens of the tenant's quotas, or raise with the time to retry."""
    usage, second = quotas.usage(tenant.quota_name), math.floor(now)
    if tenant.max_concurrent and usage.num_open >= tenant.max_concurrent:
        raise too_many_open(tenant, usage.num_open)
    check_size(tenant, tokens)
    limit = tenant.tokens_per_minute
    if limit and (spent := usage.spent(second)) + tokens > limit:
        raise too_many_tokens(tenant, spent, tokens, usage.seconds_until_free(tokens, limit, second))
    return hold(quotas, tenant, tokens, now)


def hold(quotas: Quotas, tenant: Limited, tokens: int, now: float) -> Reservation:
    """Count a request that was admitted elsewhere."""
    usage, second = quotas.usage(tenant.quota_name), math.floor(now)
    usage.open(1)
    usage.spend(tokens, second)
    return Reservation(usage, tokens, second)


def check_size(tenant: Limited, tokens: int) -> None:
    """A request above the limit would never fit."""
    limit = tenant.tokens_per_minute
    if limit and tokens > limit:
        raise BadRequest(
            f"The request may use {tokens} tokens; the limit is {limit} per minute ({tenant.title})."
            " Send a smaller one.",
            code="quota_exceeded",
        )


def too_many_open(tenant: Limited, num_open: int) -> QuotaExceeded:
    return QuotaExceeded(
        f"{tenant.title} has {num_open} open requests; its limit is {tenant.max_concurrent}. Wait for one to end.",
        retry_after_s=1.0,
    )


def too_many_tokens(tenant: Limited, spent: int, tokens: int, wait_s: int) -> QuotaExceeded:
    return QuotaExceeded(
        f"{tenant.title} has used {spent} of its {tenant.tokens_per_minute} tokens per minute, and this request"
        f" may use {tokens}. Retry in {wait_s} s.",
        retry_after_s=wait_s,
    )
