"""The cheapest machines that meet objectives: the fewest replicas of each kind, by simulation, times their price."""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec

from millrace.errors import ConfigError
from millrace.load.svg import Line, plot
from millrace.observe.slo.objective import Objective
from millrace.simulate.profile import Profile, read_profile
from millrace.simulate.requests import SimulatedRequest
from millrace.simulate.settings import SimulationSettings
from millrace.simulate.simulation import Simulated, simulate

MAX_SIMULATED = 8
"""Replicas that are simulated at once. A larger fleet is simulated as this many, with their share of the requests."""
MAX_REPLICAS = 4096


class Machine(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One kind of replica in a price list."""

    name: str
    profile: str
    dollars_per_hour: float
    settings: str = ""
    """As of `--set`."""
    max_replicas: int = MAX_REPLICAS


class PriceList(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    machine: list[Machine]


@dataclass(frozen=True, slots=True)
class Sized:
    """The fewest replicas of one kind that meet the objectives; None: not even the most allowed do."""

    machine: Machine
    profile: Profile
    replicas: int | None
    low: int | None
    """If the machine is faster than its profile by the profile's error."""
    high: int | None
    """If it is slower by that error."""
    tried: tuple[tuple[int, float], ...]
    """Replicas, and the share of requests that met every objective."""

    @property
    def dollars_per_hour(self) -> float:
        """Of the safe number: enough also if the machine is slower."""
        return self.machine.dollars_per_hour * self.high if self.high is not None else float("inf")


def read_prices(path: Path) -> list[Machine]:
    try:
        found = msgspec.convert(tomllib.loads(path.read_text(encoding="utf-8")), PriceList).machine
    except (OSError, ValueError, msgspec.ValidationError) as error:
        raise ConfigError(
            f"The price list {path} cannot be read: {error}. It has tables [[machine]] with name, profile and"
            " dollars_per_hour, and optionally settings and max_replicas.",
            param="prices",
        ) from error
    for machine in found:
        if machine.dollars_per_hour <= 0 or machine.max_replicas < 1:
            raise ConfigError(f"The price list {path}: {machine.name} needs a price and max_replicas above 0.")
    if not found:
        raise ConfigError(f"The price list {path} has no machines.")
    return found


def size(
    machine: Machine,
    requests: Sequence[SimulatedRequest],
    objectives: tuple[Objective, ...],
    *,
    seed: int = 0,
    on_try: Callable[[str], None] = lambda text: None,
) -> Sized:
    profile = read_profile(machine.profile)
    settings = SimulationSettings().changed(machine.settings)
    tried: dict[int, float] = {}

    def fewest(factor: float, start: int) -> int | None:
        scaled = profile.scaled(factor)

        def is_met(count: int) -> bool:
            done = simulate_share(requests, scaled, settings, count, objectives, seed)
            share = sum(record.is_good(objectives) for record in done.outcome.records) / max(
                1, len(done.outcome.records)
            )
            if factor == 1.0:
                tried[count] = share
            on_try(f"{machine.name} × {count}, speed {1 / factor:.2f}: {100 * share:.1f}% of requests are good")
            return all(done.outcome.meets(objective) for objective in objectives)

        return _search(is_met, start, machine.max_replicas)

    replicas = fewest(1.0, 1)
    low = fewest(1 / (1 + profile.error), max(1, (replicas or machine.max_replicas) // 2))
    high = fewest(1 + profile.error, replicas or machine.max_replicas)
    return Sized(machine, profile, replicas, low, high, tuple(sorted(tried.items())))


def simulate_share(
    requests: Sequence[SimulatedRequest],
    profile: Profile,
    settings: SimulationSettings,
    replicas: int,
    objectives: tuple[Objective, ...],
    seed: int,
) -> Simulated:
    """A fleet, or a part of it with the same load per replica: requests of a prefix stay together."""
    simulated = min(replicas, MAX_SIMULATED)
    if replicas > simulated:
        requests = [one for number, one in enumerate(requests) if _share_of(one, number, replicas) < simulated]
    return simulate(requests, profile, replace(settings, replicas=simulated), seed=seed, objectives=objectives)


def _share_of(request: SimulatedRequest, number: int, replicas: int) -> int:
    name = request.blocks[1] if len(request.blocks) > 2 else number
    return name * 2_654_435_761 % 2**32 % replicas


def _search(is_met: Callable[[int], bool], start: int, most: int) -> int | None:
    """The smallest number that meets it, which more replicas do too: doubled or halved first, then bisected."""
    known: dict[int, bool] = {}

    def met(count: int) -> bool:
        if count not in known:
            known[count] = is_met(count)
        return known[count]

    low, high = 0, min(start, most)
    while not met(high):
        if high == most:
            return None
        low, high = high, min(2 * high, most)
    while low == 0 and high > 1:
        half = high // 2
        if not met(half):
            low = half
        else:
            high = half
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if met(middle) else (middle, high)
    return high


def table(found: Sequence[Sized]) -> str:
    """The cheapest first."""
    lines = [f"{'machine':<20}{'replicas':>10}{'interval':>12}{'$/hour':>10}   profile"]
    for one in sorted(found, key=lambda one: one.dollars_per_hour):
        interval = f"{one.low or '-'} to {one.high or '-'}"
        price = "-" if one.high is None else f"{one.dollars_per_hour:.2f}"
        error = f"{one.profile.source}, error {100 * one.profile.error:.0f}%"
        lines.append(f"{one.machine.name:<20}{one.replicas or '-':>10}{interval:>12}{price:>10}   {error}")
    return "\n".join(lines)


def capacity_plot(found: Sequence[Sized]) -> str:
    lines = [
        Line(
            one.machine.name,
            [one.machine.dollars_per_hour * count for count, _ in one.tried],
            [100 * share for _, share in one.tried],
            dots=len(one.tried) == 1,
        )
        for one in found
    ]
    return plot("Requests within the objectives", lines, "$/hour", "%")


def fleet_toml(best: Sized, objectives: Sequence[Objective]) -> str:
    """`[gateway]` is read by `millrace gateway`; `[fleet]` says what to start."""
    settings = SimulationSettings().changed(best.machine.settings)
    changed = {
        name: getattr(settings, name)
        for name in ("policy", "max_running", "token_budget", "mixed_budget", "step_ms", "kv_tokens", "kv_host_gib")
        if getattr(settings, name) != getattr(SimulationSettings(), name)
    }
    lines = [
        f"# Meets {'; '.join(map(str, objectives))} for {best.dollars_per_hour:.2f} dollars per hour, as simulated.",
        "[gateway]",
        f'policy = "{settings.routing}"',
        "",
        "[fleet]",
        f'machine = "{best.machine.name}"',
        f'device = "{best.profile.device}"',
        f'model = "{best.profile.model}"',
        f"replicas = {best.high}",
        "",
        "[fleet.settings]",
        *(f"{name} = {value!r}".replace("'", '"') for name, value in changed.items()),
    ]
    return "\n".join(lines) + "\n"
