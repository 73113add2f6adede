"""Scheduling policies on a recorded trace: the real scheduler with a simulated device clock, no model.

A step takes `STEP_MS + ROW_MS × rows + TOKEN_MS × further tokens`: about what an 8B model takes on one H200. Each
request has a deadline after which it is aborted. Lengths come from the trace; no policy knows them in advance.
"""

from __future__ import annotations

import csv
import heapq
import math
import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path

import numpy as np

from millrace.bench.errors import BenchError
from millrace.bench.figures import Figure, percentile
from millrace.config import PolicyName
from millrace.plan.request import Request
from millrace.plan.scheduler import Scheduler, SchedulerSettings
from millrace.plan.step import Ended

STEP_MS, ROW_MS, TOKEN_MS = 4.9, 0.037, 0.02
MAX_RUNNING, NUM_BLOCKS, BLOCK_SIZE, TOKEN_BUDGET = 64, 16384, 16, 2048
DEADLINES_S = (5.0, 20.0, 120.0)
TENANT_SHARES = (("a", 0.6), ("b", 0.2), ("c", 0.1), ("d", 0.1))
MAX_TOKENS = 2048
TTFT_GOAL_S = 5.0
END_TOKEN = 1
POLICIES: tuple[PolicyName, ...] = ("fcfs", "shortest", "feedback", "deadline")


@dataclass(frozen=True, slots=True)
class Arrival:
    at: float
    num_prompt: int
    num_output: int
    tenant: str
    deadline: float


@dataclass(slots=True)
class ReplayResult:
    """Times of each request in order of arrival; NaN for an event that never happened."""

    policy: PolicyName
    arrivals: list[Arrival]
    first_s: list[float] = field(default_factory=list)
    total_s: list[float] = field(default_factory=list)
    in_time: list[bool] = field(default_factory=list)
    preemptions: int = 0
    wall_s: float = 0.0


def read_trace(path: Path, num_requests: int, speed: float) -> list[Arrival]:
    """Rows of TIMESTAMP, ContextTokens, GeneratedTokens, as in the Azure LLM traces, played `speed` times as fast."""
    rng, arrivals, began = random.Random(0), [], None
    names, weights = [name for name, _ in TENANT_SHARES], [share for _, share in TENANT_SHARES]
    try:
        with path.open(newline="", encoding="utf-8") as file:
            for row in csv.DictReader(file):
                stamp = datetime.fromisoformat(row["TIMESTAMP"][:26])
                began = began or stamp
                at = (stamp - began).total_seconds() / speed
                lengths = int(row["ContextTokens"]), min(int(row["GeneratedTokens"]), MAX_TOKENS)
                tenant = rng.choices(names, weights)[0]
                arrivals.append(Arrival(at, *lengths, tenant, at + rng.choice(DEADLINES_S)))
                if len(arrivals) == num_requests:
                    break
    except (OSError, KeyError, ValueError) as error:
        raise BenchError(f"{path} is not a trace with TIMESTAMP, ContextTokens and GeneratedTokens: {error}") from error
    if not arrivals:
        raise BenchError(f"{path} contains no requests.")
    return [arrival for arrival in arrivals if arrival.num_prompt > 0 and arrival.num_output > 0]


class Replay:
    """One policy over the trace."""

    def __init__(self, policy: PolicyName, arrivals: list[Arrival]) -> None:
        self._arrivals = arrivals
        self._scheduler = Scheduler(
            SchedulerSettings(
                num_blocks=NUM_BLOCKS,
                block_size=BLOCK_SIZE,
                max_running=MAX_RUNNING,
                token_budget=TOKEN_BUDGET,
                prefix_cache=True,
                policy=policy,
            )
        )
        self._first: dict[int, float] = {}
        self._ended: dict[int, tuple[float, str]] = {}
        self._left: dict[int, int] = {}
        self._policy = policy
        self._now = 0.0

    def run(self) -> ReplayResult:
        coming = [(arrival.at, index) for index, arrival in enumerate(self._arrivals)]
        heapq.heapify(coming)
        while coming or self._scheduler.has_work:
            while coming and coming[0][0] <= self._now:
                self._submit(heapq.heappop(coming)[1])
            if not self._step() and coming:
                self._now = max(self._now, coming[0][0])
        return self._result()

    def _submit(self, index: int) -> None:
        arrival = self._arrivals[index]
        prompt = np.random.default_rng(index).integers(2, 30_000, arrival.num_prompt).astype(np.int32)
        self._left[index] = arrival.num_output
        self._scheduler.submit(
            Request(
                id=index,
                prompt=prompt,
                max_tokens=MAX_TOKENS,
                end_token_ids=(END_TOKEN,),
                tenant=arrival.tenant,
                arrival=arrival.at,
                deadline=arrival.deadline,
            )
        )

    def _step(self) -> bool:
        scheduler = self._scheduler
        plan = scheduler.plan(self._now)
        self._note(scheduler.take_ended())
        if plan is None:
            return False
        num_rows, more = len(plan.rows), plan.num_tokens - len(plan.rows)
        self._now += (STEP_MS + ROW_MS * num_rows + TOKEN_MS * more) / 1e3
        ids = scheduler.rows.request_ids[plan.rows[plan.samples]].tolist()
        tokens = np.full(len(ids), 7, np.int32)
        for place, index in enumerate(ids):
            self._left[index] -= 1
            if self._left[index] == 0:
                tokens[place] = END_TOKEN
        outcome = scheduler.apply(plan.step_no, tokens)
        for index in outcome.first_ids.tolist():
            self._first.setdefault(index, self._now)
        self._note(outcome.ended)
        return True

    def _note(self, ended: tuple[Ended, ...]) -> None:
        for event in ended:
            self._ended[event.request_id] = (self._now, event.reason)

    def _result(self) -> ReplayResult:
        done = ReplayResult(self._policy, self._arrivals, preemptions=self._scheduler.num_preemptions, wall_s=self._now)
        for index, arrival in enumerate(self._arrivals):
            at, reason = self._ended[index]
            done.first_s.append(self._first.get(index, math.nan) - arrival.at)
            done.total_s.append(at - arrival.at)
            done.in_time.append(reason == "stop")
        return done


@dataclass(frozen=True, slots=True)
class PolicyFigures:
    """The figures of one policy over the whole trace."""

    policy: PolicyName
    ttft_mean_s: float
    ttft_p50_s: float
    ttft_p99_s: float
    goodput: float
    """Requests per second that ended before their deadline."""
    in_goal: float
    """Share of all requests whose first token came within `TTFT_GOAL_S`."""
    fairness: float
    """Jain's index over the slowdowns of requests: 1 if all are slowed down alike."""
    light_p99_s: float
    """TTFT p99 of all tenants but the heaviest: how much that one delays them."""
    preemptions: int

    def figures(self) -> list[Figure]:
        return [
            Figure(self.policy, "TTFT mean", self.ttft_mean_s, "s", note=f"{self.preemptions} preemptions"),
            Figure(self.policy, "TTFT p50", self.ttft_p50_s, "s"),
            Figure(self.policy, "TTFT p99", self.ttft_p99_s, "s"),
            Figure(self.policy, "goodput", self.goodput, "requests/s", note="ended before their deadline"),
            Figure(self.policy, "first token within 5 s", 100 * self.in_goal, "%"),
            Figure(self.policy, "fairness", self.fairness, "", note="Jain's index over slowdowns"),
            Figure(self.policy, "light tenants' p99", self.light_p99_s, "s", note="TTFT beside a heavy tenant"),
        ]


def policy_figures(done: ReplayResult) -> PolicyFigures:
    # A request without a first token waited until its deadline.
    waits = [total if math.isnan(first) else first for first, total in zip(done.first_s, done.total_s, strict=True)]
    slow = np.asarray([t / _alone_s(a) for t, a in zip(done.total_s, done.arrivals, strict=True)])
    heavy = max(TENANT_SHARES, key=lambda pair: pair[1])[0]
    light = [wait for wait, arrival in zip(waits, done.arrivals, strict=True) if arrival.tenant != heavy]
    return PolicyFigures(
        policy=done.policy,
        ttft_mean_s=float(np.mean(waits)),
        ttft_p50_s=percentile(waits, 50),
        ttft_p99_s=percentile(waits, 99),
        goodput=sum(done.in_time) / done.wall_s,
        in_goal=float(np.mean([first <= TTFT_GOAL_S for first in done.first_s])),
        fairness=float(slow.sum() ** 2 / (len(slow) * (slow**2).sum())),
        light_p99_s=percentile(light, 99),
        preemptions=done.preemptions,
    )


def _alone_s(arrival: Arrival) -> float:
    """Time of the request if it had the device to itself."""
    return (arrival.num_output * (STEP_MS + ROW_MS) + arrival.num_prompt * TOKEN_MS) / 1e3


def compare(arrivals: list[Arrival]) -> Iterator[ReplayResult]:
    """The trace under each policy in turn."""
    for policy in POLICIES:
        yield Replay(policy, arrivals).run()


# ── the plot ──────────────────────────────────────────────────────────────────────────────────────────────────────────
_COLOURS = {"fcfs": "#1f6f8b", "shortest": "#c8553d", "feedback": "#588157", "deadline": "#7b5ea7"}
_WIDTH, _HEIGHT, _LEFT, _TOP = 720, 360, 60, 20
_LOW_S, _HIGH_S = 0.05, 120.0


def plot_svg(results: list[ReplayResult]) -> str:
    """Cumulative distribution of TTFT, one line per policy, over a logarithmic time axis."""
    size = f'viewBox="0 0 {_WIDTH} {_HEIGHT}"'
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="sans-serif" font-size="12">',
        f'<rect width="{_WIDTH}" height="{_HEIGHT}" fill="white"/>',
    ]
    for share in (0.0, 0.25, 0.5, 0.75, 1.0):
        y = _y(share)
        parts.append(f'<line x1="{_LEFT}" x2="{_WIDTH - 20}" y1="{y:.1f}" y2="{y:.1f}" stroke="#ddd"/>')
        parts.append(f'<text x="{_LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{share:.0%}</text>')
    for seconds in (0.1, 0.5, 1, 5, 10, 30, 100):
        x = _x(seconds)
        parts.append(f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{_TOP}" y2="{_y(0.0):.1f}" stroke="#eee"/>')
        parts.append(f'<text x="{x:.1f}" y="{_y(0.0) + 18:.1f}" text-anchor="middle">{seconds:g} s</text>')
    parts.append(
        f'<text x="{_WIDTH / 2}" y="{_HEIGHT - 8}" text-anchor="middle">time to the first token (share of all'
        " requests that had it by then)</text>"
    )
    for number, done in enumerate(results):
        colour = _COLOURS[done.policy]
        parts.append(f'<polyline fill="none" stroke="{colour}" stroke-width="2" points="{_points(done)}"/>')
        parts.append(f'<text x="{_LEFT + 14}" y="{_TOP + 18 + 18 * number}" fill="{colour}">{done.policy}</text>')
    return "\n".join([*parts, "</svg>", ""])


def _points(done: ReplayResult) -> str:
    ordered = sorted(first for first in done.first_s if not math.isnan(first))
    at = np.geomspace(_LOW_S, _HIGH_S, 160)
    shares = np.searchsorted(ordered, at, side="right") / len(done.first_s)
    return " ".join(f"{_x(float(s)):.1f},{_y(float(share)):.1f}" for s, share in zip(at, shares, strict=True))


def _x(seconds: float) -> float:
    return _LEFT + (_WIDTH - 20 - _LEFT) * math.log(seconds / _LOW_S) / math.log(_HIGH_S / _LOW_S)


def _y(share: float) -> float:
    return _TOP + (_HEIGHT - 70 - _TOP) * (1 - share)
