"""A simulation against the real engine on the same requests: ratios, and the spread of the real engine."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from millrace.simulate.profile import Profile
from millrace.simulate.real_engine import RealEngine
from millrace.simulate.requests import SimulatedRequest
from millrace.simulate.settings import SimulationSettings
from millrace.simulate.simulation import Simulated, simulate

TOLERANCE = 0.05


@dataclass(frozen=True, slots=True)
class Compared:
    name: str
    simulated: float
    real: float
    """Median of the runs."""
    spread: float
    """Half the range of the runs, relative to their median."""

    @property
    def ratio(self) -> float:
        return self.simulated / self.real if self.real else (1.0 if not self.simulated else float("inf"))

    @property
    def is_met(self) -> bool:
        """Within 5%, or within the real engine's own spread."""
        return abs(self.ratio - 1) <= max(TOLERANCE, self.spread)


def compare(
    engine: RealEngine,
    profile: Profile,
    requests: Sequence[SimulatedRequest],
    num_runs: int,
    on_run: Callable[[str], None] = lambda text: None,
) -> list[Compared]:
    """The simulation runs first and knows nothing of the real runs."""
    own = engine.decided.scheduler
    settings = replace(
        SimulationSettings(),
        policy=own.policy,
        batching="static" if own.static_batching else "continuous",
        prefix_cache=own.prefix_cache,
        max_running=own.max_running,
        token_budget=own.token_budget,
        mixed_budget=own.mixed_budget,
        step_ms=1e3 * own.target.step_s if own.target is not None else 0.0,
        block_size=own.block_size,
        kv_tokens=own.num_blocks * own.block_size,
        kv_host_gib=own.host_tier.num_slots * own.host_tier.block_bytes / (1 << 30),
    )
    simulated = figures(simulate(requests, profile, settings))
    on_run(f"simulated {len(requests)} requests")
    real = []
    for number in range(num_runs):
        real.append(figures(engine.run(requests)))
        on_run(f"real run {number + 1} of {num_runs}")
    rows = []
    for name, value in simulated.items():
        values = [run[name] for run in real]
        middle = float(np.median(values))
        rows.append(Compared(name, value, middle, (max(values) - min(values)) / 2 / middle if middle else 0.0))
    return rows


def figures(done: Simulated) -> dict[str, float]:
    found = {}
    for metric in ("ttft", "tpot"):
        values = done.outcome.values(metric)
        for percent in (50, 99):
            found[f"{metric} p{percent} ms"] = 1e3 * float(np.percentile(values, percent)) if len(values) else 0.0
    found["output tokens/s"] = sum(record.output_tokens for record in done.outcome.answered) / done.outcome.seconds
    found["hit share %"] = 100 * done.counts.hit_share
    found["preemptions"] = float(done.counts.preemptions)
    found["steps"] = float(done.counts.steps)
    return found


def table(rows: Sequence[Compared]) -> str:
    lines = [f"{'':<18}{'simulated':>12}{'real':>12}{'ratio':>8}{'spread of real':>16}"]
    for row in rows:
        verdict = "" if row.is_met else "   beyond max(5%, spread)"
        lines.append(
            f"{row.name:<18}{row.simulated:>12.2f}{row.real:>12.2f}{row.ratio:>8.3f}{100 * row.spread:>15.1f}%{verdict}"
        )
    return "\n".join(lines)
