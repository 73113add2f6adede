"""A rollout: a group of replicas gets a growing share of the requests, or none once it is worse.

Time is an argument.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Callable, Sequence
from hashlib import blake2b
from typing import Any, Literal, TypeVar

import msgspec

from millrace.errors import BadRequest

State = Literal["running", "complete", "returned"]
_T = TypeVar("_T")
MIN_FAILURES = 3
"""Fewer failures say nothing."""
MIN_SLOWER_S = 0.02
"""A difference that no client notices is none."""
_KEPT = 512


class RolloutSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    group: str
    """The new replicas: those with this `group`."""
    steps: tuple[float, ...] = (0.01, 0.1, 0.5, 1.0)
    """Shares of the requests, one step after the other. It stays at the last one."""
    step_s: float = 60.0
    min_requests: int = 20
    """A step ends when it has lasted `step_s` and the group has answered this many requests in it."""
    max_more_failures: float = 0.02
    """The group returns if its share of failed requests is more than this above that of the others."""
    max_slower: float = 1.5
    """The group returns if its median time to the first data is this many times that of the others."""

    def __post_init__(self) -> None:
        wrong = [
            (not self.group, "'group' is empty; it names the new replicas"),
            (not self.steps or not all(0 < one <= 1 for one in self.steps), "'steps' must be shares above 0, up to 1"),
            (self.step_s < 0 or self.min_requests < 1, "'step_s' is negative or 'min_requests' below 1"),
            (self.max_slower <= 1 or self.max_more_failures < 0, "'max_slower' must be above 1"),
        ]
        for is_wrong, what in wrong:
            if is_wrong:
                raise BadRequest(f"The rollout is wrong: {what}.", param="rollout")


class Side:
    """What requests met on one side."""

    def __init__(self) -> None:
        self.num_requests = self.num_failed = 0
        self.first_s: deque[float] = deque(maxlen=_KEPT)

    @property
    def failed_share(self) -> float:
        return self.num_failed / max(1, self.num_requests)

    @property
    def median_first_s(self) -> float:
        return statistics.median(self.first_s) if self.first_s else 0.0

    def describe(self) -> dict[str, Any]:
        shown = round(self.median_first_s, 4)
        return {"requests": self.num_requests, "failed": self.num_failed, "median_first_data_s": shown}


class Rollout:
    def __init__(self, settings: RolloutSettings, now: float) -> None:
        self.settings = settings
        self.state: State = "running"
        self.reason = ""
        """Why the group returned."""
        self.new = Side()
        self.old = Side()
        self._step = 0
        self._step_began = now
        self._step_requests = 0

    @property
    def share(self) -> float:
        return 0.0 if self.state == "returned" else self.settings.steps[self._step]

    def chosen(self, candidates: Sequence[_T], group_of: Callable[[_T], str], who: str) -> list[_T]:
        """The candidates of the side of `who`, a session or a request; the other side if it has none."""
        sides: tuple[list[_T], list[_T]] = ([], [])
        for one in candidates:
            sides[group_of(one) == self.settings.group].append(one)
        old, new = sides
        return (new or old) if place_of(who) < self.share else (old or new)

    def failed(self, group: str) -> None:
        side = self._side(group)
        side.num_requests += 1
        side.num_failed += 1

    def answered(self, group: str, first_s: float) -> None:
        side = self._side(group)
        side.num_requests += 1
        side.first_s.append(first_s)
        self._step_requests += side is self.new

    def check(self, now: float) -> str:
        """What changed, or nothing."""
        if self.state == "returned":
            return ""
        if reason := self._worse():
            self.state, self.reason = "returned", reason
            return f"group {self.settings.group!r} returned: {reason}"
        settings = self.settings
        if self.state == "complete" or self._step_requests < settings.min_requests:
            return ""
        if now - self._step_began < settings.step_s:
            return ""
        if self._step + 1 == len(settings.steps):
            self.state = "complete"
            return f"group {settings.group!r} has its last share, {self.share:.0%}"
        self._step += 1
        self._step_began, self._step_requests = now, 0
        return f"group {settings.group!r} gets {self.share:.0%} of the requests"

    def _worse(self) -> str:
        new, old, settings = self.new, self.old, self.settings
        if new.num_failed >= MIN_FAILURES and new.failed_share > old.failed_share + settings.max_more_failures:
            return f"{new.num_failed} of {new.num_requests} requests failed, {old.failed_share:.1%} elsewhere"
        if min(len(new.first_s), len(old.first_s)) < settings.min_requests:
            return ""
        mine, theirs = new.median_first_s, old.median_first_s
        if mine > theirs * settings.max_slower and mine - theirs > MIN_SLOWER_S:
            return f"its first data takes {mine:.3f} s, {theirs:.3f} s elsewhere"
        return ""

    def _side(self, group: str) -> Side:
        return self.new if group == self.settings.group else self.old

    def describe(self) -> dict[str, Any]:
        about = {"group": self.settings.group, "state": self.state, "share": self.share, "reason": self.reason}
        return {**about, "new": self.new.describe(), "old": self.old.describe()}


def place_of(who: str) -> float:
    """From 0 to 1, always the same for a session: it meets one side as long as the share does not pass it."""
    return (
        int.from_bytes(blake2b(who.encode(errors="replace"), digest_size=6, person=b"rollout").digest(), "big") / 2**48
    )
