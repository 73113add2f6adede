"""What a step costs on a machine with a model: rates of the step-time model, with their error and range.

`millrace calibrate` measures one; `data_sheet.py` estimates one. The rates are those that `--step-ms` uses.
"""

from __future__ import annotations

import math
from importlib import resources
from pathlib import Path
from typing import Literal

import msgspec
import numpy as np

from millrace.errors import ConfigError
from millrace.plan.pacing.step_time import Floats, StepRates
from millrace.run.facts import RunnerFacts

VERSION = 1
BEYOND = 1.25
"""A step is outside the range if a part of it is larger than the largest measured one by more than this factor."""
PARTS = ("step", "prompt tokens", "decode rows", "context of decode rows", "pairs of prompt tokens")


class Profile(msgspec.Struct, frozen=True, kw_only=True):
    """Times in seconds, sizes in tokens or bytes."""

    version: int = VERSION
    model: str
    device: str
    source: Literal["measured", "data sheet"]
    note: str = ""
    """Where the figures come from: command, machine, date."""
    rates: StepRates
    host_s: float = 0.0
    """Host time of a step. With two steps in flight the device hides it."""
    error: float = 0.0
    """Relative error of the predicted time of a held-out step, root mean square."""
    noise: float = 0.0
    """Relative spread of the time of equal steps."""
    range: tuple[float, float, float, float, float] | None = None
    """Largest measured value of each part of a step, see `PARTS`. None: nothing was measured."""
    steps_in_flight: int = 2
    slow_step_s: float | None = None
    """See `RunnerFacts`; None: no step is slow."""
    step_ms: float = 0.0
    """Default target of a step that decodes; 0: none."""
    max_running: int
    token_budget: int
    mixed_budget: int = 0
    max_context: int
    kv_tokens: int
    """Tokens in the KV pool."""
    kv_token_bytes: int
    copy_bytes_per_s: float = 10e9
    """Between the KV pool and host memory."""
    copy_batch_bytes: int = 4 << 20
    disk_bytes_per_s: float = 0.0
    """Of KV blocks that are read from a disk, checksums included; 0: not measured."""
    pads_drafts: bool = False

    def facts(self) -> RunnerFacts:
        slow_step_s = math.inf if self.slow_step_s is None else self.slow_step_s
        return RunnerFacts(steps_in_flight=self.steps_in_flight, slow_step_s=slow_step_s)

    def is_outside(self, parts: Floats) -> bool:
        return self.range is not None and bool((parts > BEYOND * np.array(self.range)).any())

    def scaled(self, factor: float) -> Profile:
        """The same machine, slower or faster by a factor."""
        rates = StepRates(*(factor * self.rates.column()).tolist())
        return msgspec.structs.replace(self, rates=rates, host_s=factor * self.host_s)


def read_profile(name: str) -> Profile:
    """A file, or the name of a profile that comes with Millrace."""
    shipped = resources.files("millrace.simulate").joinpath("profiles", f"{name}.json")
    try:
        data = shipped.read_bytes() if name in shipped_profiles() else Path(name).expanduser().read_bytes()
        profile = msgspec.json.decode(data, type=Profile)
    except (OSError, msgspec.DecodeError) as error:
        raise ConfigError(
            f"The profile {name!r} cannot be read: {error}. Profiles that come with Millrace:"
            f" {', '.join(shipped_profiles())}. `millrace calibrate MODEL` measures this machine.",
            param="profile",
        ) from error
    if profile.version != VERSION:
        raise ConfigError(
            f"The profile {name!r} has version {profile.version}; this Millrace reads version {VERSION}. Measure it"
            " again with `millrace calibrate`.",
            param="profile",
        )
    return profile


def write_profile(profile: Profile, path: Path) -> None:
    path.write_bytes(msgspec.json.format(msgspec.json.encode(profile), indent=1) + b"\n")


def shipped_profiles() -> list[str]:
    folder = resources.files("millrace.simulate").joinpath("profiles")
    return sorted(file.name.removesuffix(".json") for file in folder.iterdir() if file.name.endswith(".json"))
