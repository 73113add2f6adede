"""A canary: a share of an adapter's requests goes to a new version of it, until an operator promotes or aborts it, or
it is taken back because its requests fail or are slow."""

from __future__ import annotations

import statistics
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, cast

from millrace.engine.adapters.canary_journal import KeptCanary, KeptVersion
from millrace.engine.adapters.store import Known
from millrace.link.adapter_messages import AddCanary, CanaryFigures, VersionFigures
from millrace.link.messages import Finish
from millrace.params import FinishReason

State = Literal["running", "promoted", "aborted", "returned"]
GOOD: tuple[FinishReason, ...] = ("stop", "length")
BAD: tuple[FinishReason, ...] = ("error", "crash", "deadline")
"""Requests that their clients end, or that are refused, say nothing of a version."""
MIN_FAILURES = 3
"""Fewer failed requests are no reason to take it back."""
MIN_TIMED, MAX_TIMED = 16, 64
"""Requests of each version whose times are compared: at least, and the last ones at most."""


@dataclass(slots=True)
class _Version:
    ended: int = 0
    failed: int = 0
    seconds: deque[float] = field(default_factory=lambda: deque(maxlen=MAX_TIMED))
    """For a token, without waiting."""

    def note(self, reason: FinishReason, token_s: float | None) -> None:
        if reason not in GOOD and reason not in BAD:
            return
        self.ended += 1
        self.failed += reason in BAD
        if token_s is not None:
            self.seconds.append(token_s)

    @property
    def failed_share(self) -> float:
        return self.failed / self.ended if self.ended else 0.0

    @property
    def median_s(self) -> float:
        return statistics.median(self.seconds) if self.seconds else 0.0

    def figures(self) -> VersionFigures:
        return VersionFigures(self.ended, self.failed, 1e3 * self.median_s)

    def kept(self) -> KeptVersion:
        return KeptVersion(self.ended, self.failed, list(self.seconds))

    @classmethod
    def restored(cls, kept: KeptVersion) -> _Version:
        return cls(kept.ended, kept.failed, deque(kept.seconds, MAX_TIMED))


class Canary:
    def __init__(self, asked: AddCanary, known: Known) -> None:
        """`known`: the new version, whose files were read."""
        self.asked, self.known = asked, known
        self.state: State = "running"
        self.why = ""
        """Why it was taken back."""
        self.old_path = ""
        """Where the adapter was when this version took its place."""
        self._old, self._new = _Version(), _Version()
        self._due = 0.0

    @classmethod
    def restored(cls, kept: KeptCanary) -> Canary:
        """Its files are read when a request needs them."""
        canary = cls(kept.asked, Known(kept.asked.name, Path(kept.asked.path).expanduser(), is_added=True))
        canary.state, canary.why, canary.old_path = cast("State", kept.state), kept.why, kept.old_path
        canary._old, canary._new = _Version.restored(kept.old), _Version.restored(kept.new)
        canary._due = kept.due
        return canary

    def kept(self) -> KeptCanary:
        versions = (self._old.kept(), self._new.kept())
        return KeptCanary(self.asked, self.state, self.why, self._due, self.old_path, *versions)

    def takes_next(self) -> bool:
        """Whether the adapter's next request is for the new version. Shares are exact: 0.1 is every tenth."""
        is_new = self._due + self.asked.share >= 1.0 - 1e-9
        self.count_taken(is_new=is_new)
        return is_new

    def count_taken(self, *, is_new: bool) -> None:
        self._due += self.asked.share - is_new

    def note(self, reason: FinishReason, token_s: float | None, *, is_new: bool) -> bool:
        """A request of one of the versions has ended. `token_s`: what a token took. True if the canary ends with it."""
        (self._new if is_new else self._old).note(reason, token_s)
        if self.state == "running" and (why := self._problem()):
            self.state, self.why = "returned", why
            return True
        return False

    def _problem(self) -> str:
        old, new, asked = self._old, self._new, self.asked
        if new.failed >= MIN_FAILURES and new.failed_share > old.failed_share + asked.max_failed:
            return (
                f"{new.failed} of {new.ended} requests of the new version failed, and {old.failed} of {old.ended} of"
                " the old one."
            )
        is_timed = min(len(old.seconds), len(new.seconds)) >= MIN_TIMED
        if is_timed and new.median_s > old.median_s * asked.max_slowdown:
            return (
                f"A token of the new version takes {1e3 * new.median_s:.1f} ms (median), and one of the old version"
                f" {1e3 * old.median_s:.1f} ms."
            )
        return ""

    def figures(self) -> CanaryFigures:
        return CanaryFigures(
            self.asked.name,
            self.state,
            self.asked.share,
            str(self.known.path),
            self.why,
            old=self._old.figures(),
            new=self._new.figures(),
        )


def token_seconds(finish: Finish | None) -> float | None:
    """Without waiting; None if it has no tokens."""
    if finish is None or not finish.output_tokens:
        return None
    return (finish.total_s - finish.queued_s) / finish.output_tokens
