"""Which replica gets a request. A policy is a pure choice from what a gateway knows: load reports and prefixes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from millrace.simulate.requests import SimulatedRequest
from millrace.simulate.settings import RoutingName

PREFIX_BLOCKS = 4
"""Leading blocks by which requests count as related."""
MAX_IMBALANCE = 1.25
"""A related request goes elsewhere if its replica has more work than the least loaded one by this factor, and more."""
ALLOWED_TOKENS = 16_384


@dataclass(frozen=True, slots=True)
class ReplicaLoad:
    """A replica's load report."""

    num_running: int
    num_waiting: int
    waiting_tokens: int
    """Prompt tokens to be computed: of waiting requests and of running ones."""

    @property
    def work(self) -> int:
        """About the tokens that a newcomer waits for."""
        return self.waiting_tokens + 256 * (self.num_running + self.num_waiting)


class Router(Protocol):
    """The gateway's policies have this form, so the simulator can take them as they are."""

    def choose(self, request: SimulatedRequest, loads: Sequence[ReplicaLoad]) -> int:
        """Index of the replica."""


class RoundRobin:
    def __init__(self) -> None:
        self._next = 0

    def choose(self, request: SimulatedRequest, loads: Sequence[ReplicaLoad]) -> int:
        chosen, self._next = self._next % len(loads), self._next + 1
        return chosen


class LeastTokens:
    def choose(self, request: SimulatedRequest, loads: Sequence[ReplicaLoad]) -> int:
        return min(range(len(loads)), key=lambda index: loads[index].work)


class ByPrefix:
    """Requests that begin alike go to the same replica, unless that has far more work than another."""

    def __init__(self) -> None:
        self._homes: dict[tuple[int, ...], int] = {}

    def choose(self, request: SimulatedRequest, loads: Sequence[ReplicaLoad]) -> int:
        least = min(range(len(loads)), key=lambda index: loads[index].work)
        names = _names(request)
        home = next((self._homes[name] for name in names if name in self._homes), least)
        if loads[home].work > MAX_IMBALANCE * loads[least].work + ALLOWED_TOKENS:
            home = least
        for name in names:
            self._homes.setdefault(name, home)
        if names:
            self._homes[names[0]] = home
        return home


def _names(request: SimulatedRequest) -> list[tuple[int, ...]]:
    """Its leading blocks, the longest first. One block alone is often a system prompt that all share."""
    if request.prefix_tokens:
        return [(-1 - request.prefix,)]
    most = min(len(request.blocks) - 1, PREFIX_BLOCKS)
    return [request.blocks[:length] for length in range(most, 1, -1)]


def make_router(name: RoutingName) -> Router:
    made: dict[RoutingName, type[Router]] = {"round-robin": RoundRobin, "least-tokens": LeastTokens, "prefix": ByPrefix}
    return made[name]()
