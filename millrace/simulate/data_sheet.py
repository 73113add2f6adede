"""A profile of a machine that nobody measured: from the device's data sheet and the model's size."""

from __future__ import annotations

import torch

from millrace.engine.decisions.settings import model_work
from millrace.engine.step_target import first_rates
from millrace.errors import ConfigError
from millrace.host.device_limits import known_device
from millrace.models.spec.families import spec_from_config
from millrace.run.device.defaults import CUDA_DEFAULTS
from millrace.run.device.kv_pool import bytes_per_token
from millrace.simulate.profile import Profile
from millrace.sources.resolve import resolve_model

ERROR = 0.3
"""Assumed error of predicted step times. Measured against nothing: a data sheet says what a device could do."""
BYTES_PER_VALUE = 2
HOST_S, COPY_BYTES_PER_S = 5e-4, 25e9
GIB = 1 << 30


def data_sheet_profile(device: str, memory_gib: float, model: str) -> Profile:
    """One GPU of this name with this much memory, with a model whose weights are 16 bits each."""
    name, limits = known_device(device)
    spec = spec_from_config(resolve_model(model).config)
    weights_bytes = BYTES_PER_VALUE * spec.num_parameters
    kv_token_bytes = bytes_per_token(spec, torch.bfloat16) * spec.kv_groups.num_groups
    free_bytes = CUDA_DEFAULTS.kv_fraction * memory_gib * GIB - weights_bytes
    kv_tokens = int(free_bytes / kv_token_bytes)
    if kv_tokens < spec.max_context:
        raise ConfigError(
            f"{name} with {memory_gib:g} GiB has no room for {model}: its weights take {weights_bytes / GIB:.1f} GiB,"
            f" and a context of {spec.max_context:,} tokens {spec.max_context * kv_token_bytes / GIB:.1f} GiB."
        )
    defaults = CUDA_DEFAULTS
    return Profile(
        model=model,
        device=name,
        source="data sheet",
        note="estimated from the device's peak FLOP/s and bandwidth; not measured",
        rates=first_rates(spec, limits, model_work(spec, weights_bytes, kv_token_bytes)),
        host_s=HOST_S,
        error=ERROR,
        noise=0.02,
        step_ms=defaults.step_ms,
        max_running=defaults.max_running,
        token_budget=defaults.token_budget,
        mixed_budget=defaults.min_mixed_budget,
        max_context=spec.max_context,
        kv_tokens=kv_tokens,
        kv_token_bytes=kv_token_bytes,
        copy_bytes_per_s=COPY_BYTES_PER_S,
        copy_batch_bytes=defaults.copy_batch_bytes,
        pads_drafts=defaults.pads_drafts,
    )
