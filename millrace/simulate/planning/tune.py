"""Searches the engine's settings in the simulator: one at a time, and again around the best, until nothing helps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from millrace.observe.slo.objective import Objective
from millrace.simulate.profile import Profile
from millrace.simulate.requests import SimulatedRequest
from millrace.simulate.settings import SimulationSettings
from millrace.simulate.simulation import Simulated, simulate

CHOICES: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("policy", ("fcfs", "shortest", "feedback", "deadline", "prefix")),
    ("token_budget", ("256", "512", "1024", "2048", "4096", "8192")),
    ("mixed_budget", ("128", "256", "512", "1024", "2048", "4096")),
    ("step_ms", ("0", "30", "60", "90", "150", "200", "400")),
    ("max_running", ("8", "16", "32", "64", "128", "256", "1024")),
)
MIN_GAIN = 0.01
"""A setting is changed only for a score that is better by this share."""
MAX_PASSES = 3


@dataclass(frozen=True, slots=True)
class Trial:
    changes: tuple[tuple[str, str], ...]
    score: float
    result: Simulated

    @property
    def text(self) -> str:
        return ",".join(f"{name}={value}" for name, value in self.changes)


def score_of(done: Simulated, objectives: Sequence[Objective]) -> float:
    """Share of requests within every objective, and a little for a lower mean time, which decides between equals."""
    good = sum(record.is_good(tuple(objectives)) for record in done.outcome.records) / max(1, len(done.outcome.records))
    times = done.outcome.values("e2e")
    return good + (0.05 / (1 + float(times.mean())) if len(times) else 0.0)


def tune(
    requests: Sequence[SimulatedRequest],
    profile: Profile,
    base: SimulationSettings,
    objectives: tuple[Objective, ...],
    *,
    seed: int = 0,
    on_trial: Callable[[Trial], None] = lambda trial: None,
) -> tuple[Trial, Trial]:
    """The base and the best found."""
    seen: dict[tuple[tuple[str, str], ...], Trial] = {}

    def trial(changes: dict[str, str]) -> Trial:
        key = tuple(sorted(changes.items()))
        if key not in seen:
            settings = base.changed(",".join(f"{name}={value}" for name, value in key))
            done = simulate(requests, profile, settings, seed=seed, objectives=objectives)
            seen[key] = Trial(key, score_of(done, objectives), done)
            on_trial(seen[key])
        return seen[key]

    first = best = trial({})
    for _ in range(MAX_PASSES):
        before = best
        for name, values in CHOICES:
            tries = [trial({**dict(best.changes), name: value}) for value in values if _fits(name, value, profile)]
            found = max(tries, key=lambda one: one.score, default=best)
            if found.score > best.score * (1 + MIN_GAIN):
                best = found
        if best is before:
            break
    return first, best


def _fits(name: str, value: str, profile: Profile) -> bool:
    """Rows and tokens beyond what the profile was made with would need memory that nobody counted."""
    most = {"token_budget": profile.token_budget, "mixed_budget": profile.token_budget}
    return int(value) <= {**most, "max_running": profile.max_running}.get(name, 1 << 40) if value.isdigit() else True


def config_toml(best: Trial, base: Trial, what: str) -> str:
    """Settings for `millrace serve --config`."""
    lines = [
        f"# Found by simulation on {what}: score {base.score:.3f} before, {best.score:.3f} with these settings.",
        "[plan]",
        *(f"{name} = {value if value.isdigit() else repr(value)}".replace("'", '"') for name, value in best.changes),
    ]
    return "\n".join(lines) + "\n"
