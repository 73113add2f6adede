"""What a study finds, and what studies share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from millrace.load.lengths import Lengths
from millrace.simulate.profile import Profile
from millrace.simulate.requests import Generated, SimulatedRequest
from millrace.simulate.settings import SimulationSettings
from millrace.simulate.simulation import Simulated, simulate


@dataclass(frozen=True, slots=True)
class Findings:
    heads: tuple[str, ...]
    rows: Sequence[tuple[object, ...]]
    plots: list[str]
    conclusion: str


@dataclass(frozen=True, slots=True)
class Study:
    title: str
    question: str
    method: str
    run: Callable[[Profile, int], Findings]


CHAT = Generated(rate=1.0, seconds=60.0, prompt=Lengths("lognormal", 600, 0.8), output=Lengths("lognormal", 120, 0.9))
"""Chat-like lengths; rates and seconds differ by study."""


def run_settings(requests: Sequence[SimulatedRequest], profile: Profile, text: str, seed: int) -> Simulated:
    return simulate(requests, profile, SimulationSettings().changed(text), seed=seed)


def milliseconds(done: Simulated, metric: str, percent: float) -> float:
    values = done.outcome.values(metric)
    return 1e3 * float(np.percentile(values, percent)) if len(values) else float("nan")


def tokens_per_s(done: Simulated) -> float:
    return sum(record.output_tokens for record in done.outcome.answered) / done.outcome.seconds
