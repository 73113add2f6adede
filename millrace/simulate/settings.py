"""What a simulation may change: the engine's settings, replicas and routing, as `policy=shortest,drafts=3`."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any, Literal, get_args, get_type_hints

import msgspec

from millrace.config import PolicyName
from millrace.config.sections import Batching
from millrace.errors import ConfigError
from millrace.plan.budget import StepTarget
from millrace.plan.drafts import DraftSettings
from millrace.plan.kv.disk_tier import DiskTierSettings
from millrace.plan.kv.host_tier import HostTierSettings
from millrace.plan.scheduler import SchedulerSettings
from millrace.simulate.profile import Profile

RoutingName = Literal["round-robin", "least-tokens", "power-of-two", "weighted", "prefix", "session"]
"""The gateway's policies."""
KvFormat = Literal["full", "packed", "fp8", "float16", "int8", "int4"]
KV_SHARES: dict[KvFormat, float] = {
    "full": 1.0,
    "packed": 0.75,
    "fp8": 0.53,
    "float16": 1.0,
    "int8": 0.53,
    "int4": 0.28,
}
"""Bytes of a token against 16 bits, with a 32-bit scale per vector of 128."""
GIB = 1 << 30


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulationSettings:
    """0, or -1 for `step_ms`: as in the profile."""

    policy: PolicyName = "fcfs"
    batching: Batching = "continuous"
    prefix_cache: bool = True
    aging_s: float = 30.0
    max_running: int = 0
    token_budget: int = 0
    mixed_budget: int = 0
    step_ms: float = -1.0
    block_size: int = 16
    kv_tokens: int = 0
    kv_host_gib: float = 0.0
    kv_disk_gib: float = 0.0
    disk_gb_per_s: float = 0.0
    """Rate of the disk; 0: as in the profile."""
    kv_dtype: KvFormat = "full"
    """Bytes of the KV cache: the pool holds more tokens, and a step reads fewer bytes of context."""
    drafts: int = 0
    """Drafts of a row in each step; 0: none."""
    adaptive: bool = False
    """Drafts are as many as pay, up to `drafts`."""
    acceptance: float = 0.7
    max_tokens: int = 0
    """Limit that requests ask for; 0: exactly what they generate, as `millrace load` does."""
    deadline_s: float = 0.0
    """Requests that take longer are aborted; 0: never."""
    replicas: int = 1
    routing: RoutingName = "least-tokens"
    fault_at: float = 0.0
    """Second at which a replica dies; 0: none does. Its requests go on elsewhere, with the tokens they had."""
    fault_s: float = 30.0
    """Seconds until it is back, with an empty cache."""
    classes: str = ""
    """Shares of interactive, standard and batch requests, as 0.5:0.3:0.2; none: as in the workload."""
    noise: bool = True
    """Steps vary as they did when the profile was measured."""

    def scheduler(self, profile: Profile) -> SchedulerSettings:
        step_s = (profile.step_ms if self.step_ms < 0 else self.step_ms) / 1e3
        block_bytes = profile.kv_token_bytes * self.block_size
        uncertainty = max(profile.error, 0.05)
        return SchedulerSettings(
            num_blocks=(self.kv_tokens or profile.kv_tokens) // self.block_size,
            block_size=self.block_size,
            max_running=self.max_rows(profile),
            token_budget=self.token_budget or profile.token_budget,
            mixed_budget=self.mixed_budget or profile.mixed_budget,
            target=StepTarget(step_s, profile.rates, uncertainty) if step_s else None,
            prefix_cache=self.prefix_cache,
            policy=self.policy,
            aging_s=self.aging_s,
            static_batching=self.batching == "static",
            drafts=self._draft_settings(profile),
            host_tier=HostTierSettings(
                int(self.kv_host_gib * GIB) // block_bytes,
                block_bytes,
                max(block_bytes, profile.copy_batch_bytes),
            ),
            disk_tier=DiskTierSettings(int(self.kv_disk_gib * GIB) // block_bytes),
        )

    def priced(self, profile: Profile) -> Profile:
        """The profile with this KV format and this disk. The price of a format is bytes alone: what unpacking costs was
        not measured."""
        if self.disk_gb_per_s:
            profile = msgspec.structs.replace(profile, disk_bytes_per_s=1e9 * self.disk_gb_per_s)
        if self.kv_disk_gib and not profile.disk_bytes_per_s:
            raise ConfigError(
                "kv_disk_gib is set, but the profile has no rate of a disk. Give it with disk_gb_per_s, or measure this"
                " machine with `millrace calibrate`."
            )
        share = KV_SHARES[self.kv_dtype]
        if share == 1:
            return profile
        rates = replace(profile.rates, context_token_s=profile.rates.context_token_s * share)
        return msgspec.structs.replace(
            profile,
            rates=rates,
            kv_tokens=int(profile.kv_tokens / share),
            kv_token_bytes=max(1, int(profile.kv_token_bytes * share)),
            error=max(profile.error, 0.15),
        )

    def max_rows(self, profile: Profile) -> int:
        return self.max_running or profile.max_running

    def _draft_settings(self, profile: Profile) -> DraftSettings:
        if not self.drafts:
            return DraftSettings()
        return DraftSettings(
            max_drafts=self.drafts,
            max_places=max(self.max_rows(profile), self.drafts + 1),
            is_fixed=not self.adaptive,
            is_padded=profile.pads_drafts,
        )

    def changed(self, text: str) -> SimulationSettings:
        """With `NAME=VALUE,…`."""
        kinds, values = get_type_hints(SimulationSettings), {}
        for part in filter(None, (part.strip() for part in text.split(","))):
            name, equals, value = part.partition("=")
            name = name.strip().replace("-", "_")
            if name not in kinds or not equals:
                names = ", ".join(one.name for one in fields(SimulationSettings))
                raise ConfigError(f"--what-if has {part!r}; it must be NAME=VALUE with one of {names}.")
            values[name] = _value(name, kinds[name], value.strip())
        made = replace(self, **values)
        made.check()
        return made

    def check(self) -> None:
        for name in ("replicas", "block_size", "aging_s"):
            if getattr(self, name) <= 0:
                raise ConfigError(f"{name} is {getattr(self, name)}; it must be above 0.")
        shares = self.classes.split(":") if self.classes else []
        if shares and (len(shares) != 3 or not all(part.replace(".", "", 1).isdigit() for part in shares)):
            raise ConfigError(f"classes is {self.classes!r}; it must be three shares, such as 0.5:0.3:0.2.")
        if self.fault_at and self.replicas < 2:
            raise ConfigError("fault_at needs replicas above 1: the requests go on at another one.")
        if self.kv_disk_gib and not (self.kv_host_gib and self.prefix_cache):
            raise ConfigError("kv_disk_gib needs kv_host_gib and prefix_cache: blocks go there through host memory.")
        sizes = ("drafts", "kv_tokens", "kv_host_gib", "kv_disk_gib", "max_running", "token_budget", "mixed_budget")
        for name in ("fault_at", "fault_s", "disk_gb_per_s", *sizes):
            if getattr(self, name) < 0:
                raise ConfigError(f"{name} is {getattr(self, name)}; it must be 0 or more.")
        if not 0 <= self.acceptance <= 1:
            raise ConfigError(f"acceptance is {self.acceptance}; it must be between 0 and 1.")
        if self.drafts > 15:
            raise ConfigError(f"drafts is {self.drafts}; a step verifies at most 15 of a row.")


def _value(name: str, kind: Any, text: str) -> Any:
    choices = get_args(kind)
    try:
        if choices:
            if text in choices:
                return text
        elif kind is bool:
            return {"on": True, "true": True, "1": True, "off": False, "false": False, "0": False}[text.lower()]
        else:
            return kind(text)
    except (KeyError, ValueError):
        pass
    form = ", ".join(choices) if choices else {bool: "on or off", int: "a whole number", float: "a number"}[kind]
    raise ConfigError(f"{name} is {text!r}; it must be {'one of ' if choices else ''}{form}.")
