"""How long a step with decoding rows should take, and first rates for the model of step time.

The rates follow from the device's FLOP/s and bandwidth. Where those are unknown, as on a CPU, the rates are those of a
slow one, and the first steps correct them.
"""

from __future__ import annotations

from millrace.config import Config
from millrace.engine.figures.step_figures import ModelWork
from millrace.host.device_limits import DeviceLimits
from millrace.models.spec.model_spec import ModelSpec
from millrace.plan.budget import StepTarget
from millrace.plan.pacing.step_time import StepRates
from millrace.run.device.defaults import DeviceDefaults

SLOW_DEVICE = DeviceLimits(flops=80e9, bytes_per_s=5e9, step_flops=40e9)
FIRST_CHUNK = 64
"""Prompt tokens beside decode rows on a device of unknown speed, until larger steps were measured."""
OVERHEAD_S = 3e-4
"""Time of a step that depends on nothing: launches, planning."""


def make_step_target(step_s: float, spec: ModelSpec, limits: DeviceLimits, work: ModelWork) -> StepTarget | None:
    """None if no time is to limit steps. `step_s`: see `target_step_s`."""
    if step_s == 0:
        return None
    is_unknown = limits.step_flops <= 0 or limits.bytes_per_s <= 0
    rates = first_rates(spec, SLOW_DEVICE if is_unknown else limits, work)
    return StepTarget(step_s, rates, first_chunk=FIRST_CHUNK if is_unknown else 0)


def first_rates(spec: ModelSpec, limits: DeviceLimits, work: ModelWork) -> StepRates:
    """Rates by what the device can do, before any step was measured."""
    token_s = work.token_flops / limits.step_flops
    return StepRates(
        step_s=OVERHEAD_S + work.weights_bytes / limits.bytes_per_s,
        prompt_token_s=token_s,
        decode_row_s=token_s + 2 * spec.hidden_size * spec.vocab_size / limits.step_flops,
        context_token_s=work.context_bytes / limits.bytes_per_s,
        pair_s=work.pair_flops / limits.step_flops,
    )


def target_step_s(config: Config, defaults: DeviceDefaults) -> float:
    """The setting, or the device's default; 0 if no time is to limit steps."""
    return (defaults.step_ms if config.plan.step_ms < 0 else config.plan.step_ms) / 1e3
