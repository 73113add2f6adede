"""The canaries of an engine's adapters, and which open requests they count."""

from __future__ import annotations

import logging

from millrace.engine.adapters.canary import Canary, State
from millrace.engine.adapters.store import Known
from millrace.link.adapter_messages import AddCanary, CanaryFigures, CanaryStats
from millrace.link.messages import Finish
from millrace.params import FinishReason

log = logging.getLogger(__name__)

MAX_RUNNING = 16
"""At once, which also bounds the labels of metrics."""


class Canaries:
    def __init__(self) -> None:
        self._last: dict[str, Canary] = {}
        """By adapter; the last one, which may have ended."""
        self._counted: dict[int, tuple[Canary, bool]] = {}
        """By open request: whether it is for the new version."""
        self._num_ended: dict[State, int] = {}

    def running(self, name: str) -> Canary | None:
        canary = self._last.get(name)
        return canary if canary is not None and canary.state == "running" else None

    def why_not(self, asked: AddCanary) -> str:
        """Why this one cannot be started; empty if it can."""
        if self.running(asked.name) is not None:
            return f"A canary of {asked.name!r} runs already. Promote or abort it first."
        if sum(one.state == "running" for one in self._last.values()) >= MAX_RUNNING:
            return f"{MAX_RUNNING} canaries run already, which is the limit. Promote or abort one first."
        return ""

    def start(self, asked: AddCanary, known: Known) -> None:
        self._last[asked.name] = Canary(asked, known)

    def end(self, name: str, state: State) -> Canary | None:
        """None if none is running."""
        canary = self.running(name)
        if canary is not None:
            canary.state = state
            self._count(canary)
        return canary

    def forget(self, name: str) -> None:
        """The adapter was removed or replaced."""
        self.end(name, "aborted")
        self._last.pop(name, None)

    def version(self, name: str, request_id: int) -> Known | None:
        """The version of the adapter that the request is for; None: the old one."""
        canary = self.running(name)
        if canary is None:
            return None
        is_new = canary.takes_next()
        self._counted[request_id] = (canary, is_new)
        return canary.known if is_new else None

    def close(self, request_id: int, reason: FinishReason, finish: Finish | None) -> None:
        canary, is_new = self._counted.pop(request_id, (None, False))
        if canary is not None and canary.note(reason, finish, is_new=is_new):
            self._count(canary)
            log.warning("The canary of the adapter %r was taken back: %s", canary.asked.name, canary.why)

    def _count(self, canary: Canary) -> None:
        self._num_ended[canary.state] = self._num_ended.get(canary.state, 0) + 1

    def figures(self, name: str) -> CanaryFigures | None:
        canary = self._last.get(name)
        return None if canary is None else canary.figures()

    def stats(self) -> CanaryStats:
        running = tuple(one.figures() for one in self._last.values() if one.state == "running")
        return CanaryStats(running, {str(state): count for state, count in self._num_ended.items()})
