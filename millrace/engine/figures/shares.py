"""Running, waiting and ended requests and their tokens, by tenant. The number of names is bounded."""

from __future__ import annotations

from dataclasses import dataclass

from millrace.link.engine_stats import TenantFigures
from millrace.link.messages import Finish
from millrace.plan.request import Diagnostics

MAX_NAMES = 48
OTHERS = "(others)"
"""Counts every name after the first `MAX_NAMES`."""


@dataclass(slots=True)
class _Share:
    running: int = 0
    waiting: int = 0
    requests: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    loaded_tokens: int = 0
    read_tokens: int = 0
    placed_tokens: int = 0


class Shares:
    def __init__(self) -> None:
        self._shares: dict[str, _Share] = {}

    def _share(self, name: str) -> _Share:
        share = self._shares.get(name)
        if share is None:
            name = name if len(self._shares) < MAX_NAMES else OTHERS
            share = self._shares.setdefault(name, _Share())
        return share

    def open(self, name: str) -> None:
        self._share(name).waiting += 1

    def start(self, name: str) -> None:
        share = self._share(name)
        share.waiting -= 1
        share.running += 1

    def pause(self, name: str) -> None:
        """A running request was preempted."""
        share = self._share(name)
        share.running -= 1
        share.waiting += 1

    def close(self, name: str, *, was_running: bool) -> None:
        share = self._share(name)
        if was_running:
            share.running -= 1
        else:
            share.waiting -= 1

    def count(self, name: str, finish: Finish, noted: Diagnostics) -> None:
        """A request ended."""
        share = self._share(name)
        share.requests += 1
        share.prompt_tokens += finish.prompt_tokens
        share.cached_tokens += finish.cached_tokens
        share.output_tokens += finish.output_tokens
        loaded = min(noted.loaded_tokens, finish.cached_tokens)  # Evicted again, it is computed.
        share.loaded_tokens += loaded
        share.read_tokens += min(noted.read_tokens, loaded)
        share.placed_tokens += finish.placed_tokens

    def figures(self) -> tuple[TenantFigures, ...]:
        return tuple(
            TenantFigures(
                name,
                share.running,
                share.waiting,
                share.requests,
                share.prompt_tokens,
                share.cached_tokens,
                share.output_tokens,
                share.loaded_tokens,
                share.read_tokens,
                share.placed_tokens,
            )
            for name, share in self._shares.items()
        )
