"""What a study finds, and what studies share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

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


class AnyStudy(Protocol):
    @property
    def title(self) -> str: ...

    @property
    def question(self) -> str: ...

    @property
    def method(self) -> str: ...


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


def page(name: str, study: AnyStudy, found: Findings, origin: str) -> str:
    """Markdown. Plots are in `NAME.svg`, or `NAME-2.svg` and so on. `origin`: the command, and where it ran."""
    lines = [
        f"# {study.title}",
        "",
        f"{study.question} {study.method}",
        "",
        origin,
        "",
        "| " + " | ".join(found.heads) + " |",
        "| " + " | ".join("---" for _ in found.heads) + " |",
        *("| " + " | ".join(_cell(value) for value in row) + " |" for row in found.rows),
        "",
        *(f"![{study.title}]({name}{'' if at == 0 else f'-{at + 1}'}.svg)" for at in range(len(found.plots))),
        "",
        f"**Conclusion.** {found.conclusion}",
    ]
    return "\n".join(lines) + "\n"


def _cell(value: object) -> str:
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.2f}" if abs(value) < 10 else f"{value:.1f}"
    return str(value)
