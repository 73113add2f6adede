"""The canaries of an engine's adapters, and which open requests they count. A journal keeps them over restarts."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

from millrace.engine.adapters.canary import Canary, State, token_seconds
from millrace.engine.adapters.canary_journal import CanaryJournal, Line
from millrace.engine.adapters.store import Known
from millrace.link.adapter_messages import AddCanary, CanaryFigures, CanaryStats
from millrace.link.messages import Finish
from millrace.params.classes import FinishReason

log = logging.getLogger(__name__)

MAX_RUNNING = 16
"""At once, which also bounds the labels of metrics."""


class Canaries:
    def __init__(self, journal: CanaryJournal | None = None) -> None:
        """`journal`: of the engine before this one, which is continued."""
        self._last: dict[str, Canary] = {}
        """By adapter; the last one, which may have ended."""
        self._counted: dict[int, tuple[Canary, bool]] = {}
        """By open request: whether it is for the new version."""
        self._lost: dict[int, tuple[Canary, bool]] = {}
        """The same of requests whose engine died. They keep their version if their answers have begun."""
        self._num_ended: dict[State, int] = {}
        self.journal = journal
        if journal is not None and (lines := journal.read()):
            self._restore(lines)
            journal.write_anew(self._lines())

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
        canary = self._last[asked.name] = Canary(asked, known)
        self._write(Line(canary=canary.kept()))

    def end(self, name: str, state: State, old_path: str = "") -> Canary | None:
        """None if none is running. `old_path`: of the version that a promoted one replaces."""
        canary = self.running(name)
        if canary is not None:
            canary.state, canary.old_path = state, old_path
            self._count(canary)
            self._write(Line(canary=canary.kept()))
        return canary

    def forget(self, name: str) -> None:
        """The adapter was removed or replaced."""
        self.end(name, "aborted")
        if self._last.pop(name, None) is not None:
            self._write(Line(forgotten=name))

    def path_of(self, name: str, path: Path) -> Path:
        """Where the adapter of this name is, which was given as being at `path`: a version may have been promoted."""
        canary = self._last.get(name)
        is_promoted = canary is not None and canary.state == "promoted" and canary.old_path == str(path)
        return canary.known.path if canary is not None and is_promoted else path

    def version(self, name: str, request_id: int, *, has_output: bool = False) -> Known | None:
        """The version of the adapter that the request is for; None: the old one. `has_output`: an engine that died
        began its answer."""
        lost = self._lost.pop(request_id, None)
        canary = self.running(name)
        if canary is None:
            return None
        is_again = lost is not None and lost[0] is canary and has_output
        is_new = lost[1] if lost is not None and is_again else canary.takes_next()
        self._counted[request_id] = (canary, is_new)
        self._write(Line(taken=(name, request_id, is_new), is_again=is_again))
        return canary.known if is_new else None

    def close(self, request_id: int, reason: FinishReason, finish: Finish | None) -> None:
        if request_id not in self._counted:
            return
        canary, is_new = self._counted.pop(request_id)
        token_s = token_seconds(finish)
        self._note(canary, reason, token_s, is_new=is_new)
        self._write(Line(ended=(request_id, reason, token_s)))

    def stop(self) -> None:
        """The engine stops in order."""
        if self.journal is not None:
            if self._last:
                self.journal.write(Line(is_stopped=True))
            self.journal.close()

    def _note(self, canary: Canary, reason: FinishReason, token_s: float | None, *, is_new: bool) -> None:
        if canary.note(reason, token_s, is_new=is_new):
            self._count(canary)
            log.warning("The canary of the adapter %r was taken back: %s", canary.asked.name, canary.why)

    def _count(self, canary: Canary) -> None:
        self._num_ended[canary.state] = self._num_ended.get(canary.state, 0) + 1

    # -- the journal -----------------------------------------------------------------------------------------------

    def _write(self, line: Line) -> None:
        if self.journal is None:
            return
        self.journal.write(line)
        if self.journal.is_long:
            self.journal.write_anew(self._lines())

    def _lines(self) -> Iterator[Line]:
        for canary in self._last.values():
            yield Line(canary=canary.kept())
        for request_id, (canary, is_new) in self._lost.items():
            yield Line(lost=(canary.asked.name, request_id, is_new))
        for request_id, (canary, is_new) in self._counted.items():
            yield Line(taken=(canary.asked.name, request_id, is_new), is_again=True)

    def _restore(self, lines: list[Line]) -> None:
        for line in lines:
            self._apply(line)
        self._num_ended = {}  # Since this engine began.
        self._count_crash()

    def _apply(self, line: Line) -> None:
        if line.canary is not None:
            before = self._last.get(line.canary.asked.name)
            canary = self._last[line.canary.asked.name] = Canary.restored(line.canary)
            for requests in (self._counted, self._lost):
                requests.update({one: (canary, new) for one, (of, new) in requests.items() if of is before})
        elif line.forgotten:
            self._last.pop(line.forgotten, None)
        elif line.taken is not None or line.lost is not None:
            name, request_id, is_new = line.taken or line.lost or ("", 0, False)
            if (known := self._last.get(name)) is None:
                return
            if line.lost is not None:
                self._lost[request_id] = known, is_new
                return
            self._lost.pop(request_id, None)
            if not line.is_again:
                known.count_taken(is_new=is_new)
            self._counted[request_id] = known, is_new
        elif line.ended is not None:
            request_id, reason, token_s = line.ended
            ending, is_new = self._counted.pop(request_id, (None, False))
            if ending is not None:
                ending.note(reason, token_s, is_new=is_new)
        elif line.is_stopped:
            self._counted, self._lost = {}, {}

    def _count_crash(self) -> None:
        """Requests were open when the engine ended: it crashed. That is one failure of the version that ran; of the new
        one if both did, as the old one ran before it."""
        for canary in self._last.values():
            ran = {is_new for one, is_new in self._counted.values() if one is canary}
            if ran and canary.state == "running":
                log.warning("The engine ended while the canary of the adapter %r ran, which counts.", canary.asked.name)
                self._note(canary, "crash", None, is_new=True in ran)
        self._lost |= self._counted
        self._counted = {}

    # -- figures ---------------------------------------------------------------------------------------------------

    def figures(self, name: str) -> CanaryFigures | None:
        canary = self._last.get(name)
        return None if canary is None else canary.figures()

    def stats(self) -> CanaryStats:
        running = tuple(one.figures() for one in self._last.values() if one.state == "running")
        return CanaryStats(running, {str(state): count for state, count in self._num_ended.items()})
