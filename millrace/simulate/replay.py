"""A step log, priced: what each step computed, what became of each request, and why some waited for their first token.

A step log has no times. Steps take what a profile says, one after the other, and a request counts as arrived when it
was first admitted: time in the queue, and idle time, are not in the log.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from millrace.errors import ConfigError
from millrace.load.svg import Line, plot
from millrace.plan.pacing.step_time import step_parts
from millrace.plan.step import StepPlan
from millrace.run.ranks.recorder import RunnerSetup
from millrace.run.step_log import read_log
from millrace.simulate.profile import Profile
from millrace.simulate.requests import SimulatedRequest

MAX_POINTS = 600
MAX_SHOWN = 20


@dataclass(slots=True)
class LoggedRequest:
    request_id: int
    num_prompt: int
    at_s: float
    """When it was first admitted."""
    first_s: float = math.nan
    end_s: float = math.nan
    num_steps: int = 0
    """Steps until its first token that computed a part of its prompt."""
    others: int = 0
    """Tokens of other requests in those steps."""
    computed: int = 0
    """Tokens after its last step."""
    preemptions: int = 0
    reason: str = "still running"

    @property
    def ttft_s(self) -> float:
        return self.first_s - self.at_s

    @property
    def num_output(self) -> int:
        return max(1, self.computed - self.num_prompt + 1)

    def why(self) -> str:
        """Of its time to the first token."""
        parts = [f"{self.num_prompt:,} prompt tokens in {self.num_steps} steps with {self.others:,} tokens of others"]
        if self.preemptions:
            parts.append(f"preempted {self.preemptions} times")
        return ", ".join(parts)


@dataclass(slots=True)
class Replayed:
    setup: RunnerSetup
    requests: dict[int, LoggedRequest] = field(default_factory=dict)
    at: list[float] = field(default_factory=list)
    """End of each step."""
    rows: list[int] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    running: list[int] = field(default_factory=list)
    outside: int = 0
    """Steps outside the profile's range."""

    def workload(self) -> list[SimulatedRequest]:
        """The requests as a workload: equal lengths and times, nothing shared."""
        ordered = sorted(self.requests.values(), key=lambda one: one.at_s)
        return [SimulatedRequest(one.at_s, one.num_prompt, one.num_output) for one in ordered]


def replay(path: Path, profile: Profile) -> Replayed:
    try:
        records = read_log(path)
    except (OSError, ValueError) as error:
        raise ConfigError(f"The step log {path} cannot be read: {error}") from error
    if not records or not isinstance(records[0], RunnerSetup):
        raise ConfigError(f"The step log {path} is empty.")
    found, now, by_row = Replayed(records[0]), 0.0, dict[int, LoggedRequest]()
    rates = profile.rates.column()
    for plan in (record for record in records if isinstance(record, StepPlan)):
        for release in plan.released:
            if (left := by_row.pop(release.row, None)) is not None:
                left.preemptions += release.reason == "preempted"
                left.reason, left.end_s = release.reason, now
        for admission in plan.admitted:
            number = admission.request_id
            known = found.requests.setdefault(number, LoggedRequest(number, admission.num_prompt, now))
            known.reason, by_row[admission.row] = "still running", known
        parts = step_parts(plan)
        now += profile.host_s + float(parts @ rates)
        found.outside += profile.is_outside(parts)
        _note(plan, by_row, now)
        found.at.append(now)
        found.rows.append(len(plan.rows))
        found.tokens.append(plan.num_tokens)
        found.running.append(len(by_row))
    if not found.at:
        raise ConfigError(f"The step log {path} has no steps.")
    return found


def _note(plan: StepPlan, by_row: dict[int, LoggedRequest], now: float) -> None:
    ends, total = (plan.starts + plan.counts).tolist(), plan.num_tokens
    columns = zip(plan.rows.tolist(), plan.counts.tolist(), ends, plan.samples.tolist(), strict=True)
    for row, count, end, draws in columns:
        request = by_row.get(row)
        if request is None:
            continue
        request.computed = max(request.computed, end)
        if math.isnan(request.first_s):
            request.num_steps += 1
            request.others += total - count
            if draws:
                request.first_s = now


def table(found: Replayed, limit_s: float) -> str:
    """The requests whose first token came later than the limit, the slowest first."""
    ended = [one for one in found.requests.values() if not math.isnan(one.first_s)]
    late = sorted((one for one in ended if one.ttft_s > limit_s), key=lambda one: -one.ttft_s)
    num_preemptions = sum(one.preemptions for one in found.requests.values())
    lines = [
        f"{len(found.at):,} steps of {found.setup.model}, {found.at[-1]:.1f} s as priced",
        f"{len(found.requests)} requests, {num_preemptions} preemptions",
        f"{len(late)} requests got their first token later than {1e3 * limit_s:g} ms after they were admitted",
    ]
    if found.outside:
        lines.append(f"{found.outside:,} steps are larger than any that the profile was measured with")
    lines += [
        f"  request {one.request_id}: {1e3 * one.ttft_s:.0f} ms, {one.why()}; ended: {one.reason}"
        for one in late[:MAX_SHOWN]
    ]
    return "\n".join(lines)


def plots(found: Replayed) -> list[str]:
    keep = slice(None, None, max(1, len(found.at) // MAX_POINTS))
    drawn: Sequence[tuple[str, list[int], str]] = (
        ("Running requests", found.running, "requests"),
        ("Rows of a step", found.rows, "rows"),
        ("Tokens of a step", found.tokens, "tokens"),
    )
    lines = [
        plot(title, [Line("", found.at[keep], [float(y) for y in ys[keep]])], "s", unit) for title, ys, unit in drawn
    ]
    known = [one for one in found.requests.values() if not math.isnan(one.first_s)]
    times = Line("", [one.at_s for one in known], [1e3 * one.ttft_s for one in known], dots=True)
    return [*lines, plot("First token after admission", [times], "s", "ms")]
