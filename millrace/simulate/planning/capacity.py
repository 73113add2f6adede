"""The cheapest machines that meet objectives: the fewest replicas of each kind, by simulation, times their price."""

from __future__ import annotations

import json
import math
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
    spot_dollars_per_hour: float = 0.0
    """Price of a machine that may be taken away."""
    spot_share: float = 0.0
    """Most of the replicas that may be such machines, from 0 to 1."""
    spot_lost: float = 0.1
    """Share of them that is away at a bad time."""


class ApiPrice(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What somebody else's API takes for tokens."""

    name: str
    dollars_per_million_prompt: float
    dollars_per_million_output: float


class PriceList(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    machine: list[Machine]
    api: list[ApiPrice] = []


@dataclass(frozen=True, slots=True)
class Bought:
    """Replicas to pay for, so that enough are there when spot machines are taken away."""

    on_demand: int
    spot: int
    dollars_per_hour: float


def bought(machine: Machine, needed: int) -> Bought:
    """The cheapest mix. Replacing a machine that is away takes a further one; whole machines only."""
    found = [Bought(needed, 0, machine.dollars_per_hour * needed)]
    if machine.spot_dollars_per_hour and machine.spot_share:
        for total in range(needed, 2 * needed + 2):
            spot = int(machine.spot_share * total)
            if total - math.ceil(machine.spot_lost * spot) >= needed:
                price = machine.dollars_per_hour * (total - spot) + machine.spot_dollars_per_hour * spot
                found.append(Bought(total - spot, spot, price))
                break
    return min(found, key=lambda one: one.dollars_per_hour)


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
        return self.bought.dollars_per_hour if self.bought is not None else float("inf")

    @property
    def bought(self) -> Bought | None:
        return bought(self.machine, self.high) if self.high is not None else None


def read_prices(path: Path) -> PriceList:
    try:
        prices = msgspec.convert(tomllib.loads(path.read_text(encoding="utf-8")), PriceList)
    except (OSError, ValueError, msgspec.ValidationError) as error:
        raise ConfigError(
            f"The price list {path} cannot be read: {error}. It has tables [[machine]] with name, profile and"
            " dollars_per_hour, and optionally settings, max_replicas, spot_dollars_per_hour, spot_share and spot_lost;"
            " and tables [[api]] with name, dollars_per_million_prompt and dollars_per_million_output.",
            param="prices",
        ) from error
    for machine in prices.machine:
        if machine.dollars_per_hour <= 0 or machine.max_replicas < 1:
            raise ConfigError(f"The price list {path}: {machine.name} needs a price and max_replicas above 0.")
        if not (0 <= machine.spot_share <= 1 and 0 <= machine.spot_lost < 1):
            raise ConfigError(f"The price list {path}: {machine.name} has a share that is not between 0 and 1.")
    if not prices.machine:
        raise ConfigError(f"The price list {path} has no machines.")
    return prices


def api_table(best: Sized, apis: Sequence[ApiPrice], requests: Sequence[SimulatedRequest]) -> str:
    """The plan's price beside what APIs take for the same tokens."""
    hours = max(max((one.at_s for one in requests), default=0.0), 1.0) / 3600
    prompt = sum(one.num_prompt for one in requests) / hours / 1e6
    output = sum(one.num_output for one in requests) / hours / 1e6
    lines = [f"{prompt:,.1f} million prompt tokens and {output:,.2f} million output tokens per hour:"]
    lines.append(f"  {'this plan':<20}{best.dollars_per_hour:>10.2f} $/hour")
    for api in apis:
        price = prompt * api.dollars_per_million_prompt + output * api.dollars_per_million_output
        lines.append(f"  {api.name:<20}{price:>10.2f} $/hour, {price / best.dollars_per_hour:.2f} times the plan")
    return "\n".join(lines)


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

        return smallest_met(is_met, start, machine.max_replicas)

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


def smallest_met(is_met: Callable[[int], bool], start: int, most: int) -> int | None:
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


OPTIONS = ("policy", "max_running", "token_budget", "mixed_budget", "step_ms", "kv_tokens", "kv_host_gib", "kv_dtype")
FIRST_PORT, MAX_PER_TABLE = 8101, 256


def fleet_toml(best: Sized, objectives: Sequence[Objective]) -> str:
    """A file for `millrace up`: replicas and the gateway, on the machine where it is started."""
    settings, counts = SimulationSettings().changed(best.machine.settings), best.bought
    assert counts is not None
    left, port = counts.on_demand + counts.spot, FIRST_PORT
    lines = [
        f"# Meets {'; '.join(map(str, objectives))} for {best.dollars_per_hour:.2f} dollars per hour, as simulated.",
        f"# {left} × {best.machine.name} ({best.profile.device}), {counts.spot} of them spot machines.",
        "# All replicas are on one machine here. For further machines give each the tables that it starts, and the",
        "# gateway a table [[replicas]] with the 'url' of every replica elsewhere; several GPUs of one machine need",
        '# tables of their own with environment = { CUDA_VISIBLE_DEVICES = "…" }.',
        "[gateway]",
        f'policy = "{settings.routing}"',
    ]
    arguments = []
    for name in OPTIONS:
        if getattr(settings, name) != getattr(SimulationSettings(), name):
            arguments += [
                f"--{name.replace('_', '-')}",
                f"{getattr(settings, name):g}"
                if isinstance(getattr(settings, name), float)
                else str(getattr(settings, name)),
            ]
    for number in range(-(-left // MAX_PER_TABLE)):
        count = min(left, MAX_PER_TABLE)
        name = f"{best.profile.model.rstrip('/').rpartition('/')[2]}-{number}" if left > MAX_PER_TABLE or number else ""
        lines += ["", "[[serve]]", f"model = {json.dumps(best.profile.model)}", f"port = {port}", f"count = {count}"]
        lines += [f"name = {json.dumps(name)}"] if name else []
        lines += [f"args = {json.dumps(arguments)}"] if arguments else []
        left, port = left - count, port + count
    return "\n".join(lines) + "\n"
