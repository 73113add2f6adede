"""What goes where in memory, decided before anything is allocated: weights, the worst step, the KV pool.

When it does not fit, the error names the one setting to change and the value to give it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from millrace.config import MOST_RUNNING, Config
from millrace.errors import MemoryPlanError
from millrace.models.spec import ModelSpec
from millrace.run.kv_pool import KvFormat, bytes_per_token

GIB = 1 << 30
MIN_KV_TOKENS = 256
GRAPHS_BYTES = 1 << 30
"""Room for the captured graphs' own memory on a GPU."""
CPU_BUDGETS = (512, 512)
"""Tokens in one step: when nothing decodes, and when something does."""
CUDA_BUDGET = 8192
SMOOTH_STEP_S = 0.045
"""How long a step that also decodes may take: what its streams see as a pause."""
LARGE_GPU_FLOPS = 600e12
CPU_RUNNING, CUDA_RUNNING = 256, MOST_RUNNING
"""Requests that run at once where nothing else is asked for."""
CPU_FRACTION, CUDA_FRACTION = 0.25, 0.9


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    weights_bytes: int
    activation_bytes: int
    kv_bytes: int
    kv_dtype: KvFormat
    kv_tokens: int
    num_blocks: int
    max_context: int
    max_running: int
    token_budget: int
    mixed_budget: int
    free_bytes: int

    def parts(self) -> dict[str, int]:
        """Name of each part to its bytes, as a person reads it. A pool that is not full says what it is."""
        kept = "" if self.kv_dtype == "full" else f", {self.kv_dtype}"
        return {
            "weights": self.weights_bytes,
            "activations, worst step": self.activation_bytes,
            f"KV pool, {self.kv_tokens:,} tokens{kept}": self.kv_bytes,
            "left free": self.free_bytes - self.weights_bytes - self.activation_bytes - self.kv_bytes,
        }


def make_memory_plan(
    config: Config,
    spec: ModelSpec,
    *,
    dtype: torch.dtype,
    weights_bytes: int,
    device_kind: str,
    free_bytes: int,
    kv_dtype: KvFormat = "full",
) -> MemoryPlan:
    max_running = _max_running(config, device_kind)
    token_budget, mixed_budget = _budgets(config, spec, device_kind, max_running)
    max_context = _max_context(config, spec)
    activation_bytes = _worst_step_bytes(spec, max_running, token_budget, dtype, device_kind)
    per_token = bytes_per_token(spec, dtype, kv_dtype)
    fixed = weights_bytes + activation_bytes
    if fixed + MIN_KV_TOKENS * per_token > free_bytes:
        raise _too_big(spec, dtype, weights_bytes, activation_bytes, free_bytes)
    kv_tokens = _kv_tokens(config, device_kind, free_bytes - fixed, per_token, max_running * max_context)
    num_blocks = max(1, kv_tokens // config.plan.block_size)
    kv_tokens = num_blocks * config.plan.block_size
    if fixed + kv_tokens * per_token > free_bytes:
        fits = (free_bytes - fixed) / GIB
        raise MemoryPlanError(
            f"The KV pool asks for {kv_tokens * per_token / GIB:.2f} GiB, but beside the weights and activations"
            f" ({fixed / GIB:.2f} GiB) only {fits:.2f} GiB are free. Set --kv-gib {fits * 0.9:.2f} or less."
        )
    return MemoryPlan(
        weights_bytes=weights_bytes,
        activation_bytes=activation_bytes,
        kv_bytes=kv_tokens * per_token,
        kv_dtype=kv_dtype,
        kv_tokens=kv_tokens,
        num_blocks=num_blocks,
        max_context=max_context,
        max_running=max_running,
        token_budget=token_budget,
        mixed_budget=mixed_budget,
        free_bytes=free_bytes,
    )


def _max_running(config: Config, device_kind: str) -> int:
    """As asked; or what suits the device, but no more than the tokens of a budget that was asked for: rows that decode
    come on top of it, and whoever wants short steps wants few of them."""
    chosen = CPU_RUNNING if device_kind == "cpu" else CUDA_RUNNING
    return config.plan.max_running or min(chosen, config.plan.token_budget or chosen)


def _budgets(config: Config, spec: ModelSpec, device_kind: str, max_running: int) -> tuple[int, int]:
    """Tokens per step: all but those of rows that decode, and all of a step that decodes. The first is no less than the
    number of rows, so that these at most double it."""
    chosen, mixed = CPU_BUDGETS if device_kind == "cpu" else (CUDA_BUDGET, _smooth_budget(spec))
    token_budget = config.plan.token_budget or max(chosen, max_running)
    return token_budget, min(config.plan.mixed_budget or mixed, token_budget)


def _smooth_budget(spec: ModelSpec) -> int:
    """Tokens of a step that also decodes, from what a token costs: small models take many without a pause."""
    tokens = SMOOTH_STEP_S * LARGE_GPU_FLOPS / (2 * spec.active_parameters)
    return max(2048, min(CUDA_BUDGET, int(tokens) // 1024 * 1024))


def _max_context(config: Config, spec: ModelSpec) -> int:
    asked, own = config.model.max_context, spec.max_context
    if asked > own:
        raise MemoryPlanError(f"model.max_context is {asked}, but the model's own context is {own}; set at most {own}.")
    return asked or own


def _kv_tokens(config: Config, device_kind: str, left: int, per_token: int, most_useful: int) -> int:
    if config.memory.kv_tokens:
        return config.memory.kv_tokens
    if config.memory.kv_gib:
        return int(config.memory.kv_gib * GIB) // per_token
    fraction = config.memory.fraction or (CPU_FRACTION if device_kind == "cpu" else CUDA_FRACTION)
    # More than every row at full context could never be used.
    return min(int(left * fraction) // per_token, most_useful)


def _worst_step_bytes(
    spec: ModelSpec, max_running: int, token_budget: int, dtype: torch.dtype, device_kind: str
) -> int:
    """An upper bound on what one step holds beside weights and cache: live activations and float32 logits."""
    widest_mlp = max(spec.inner_size, spec.moe.inner_size * spec.moe.top_k if spec.moe is not None else 0)
    qkv = spec.q_size + 2 * spec.kv_size
    per_token = 4 * spec.hidden_size + 2 * qkv + 3 * widest_mlp
    logits = max_running * spec.vocab_size * 4
    most_tokens = token_budget + max_running
    # Sampling holds the scaled logits, their softmax and a float64 cumulative sum at once, and penalties a count and
    # a mark for every token of every row.
    worst = most_tokens * per_token * max(dtype.itemsize, 4) + 5 * logits + 5 * logits // 4
    # A GPU holds them twice: once for captured steps, once for those that are not; and the graphs themselves.
    return worst if device_kind == "cpu" else 2 * worst + GRAPHS_BYTES


def _too_big(spec: ModelSpec, dtype: torch.dtype, weights: int, activations: int, free: int) -> MemoryPlanError:
    text = (
        f"The model does not fit: weights {weights / GIB:.2f} GiB and activations {activations / GIB:.2f} GiB,"
        f" but {free / GIB:.2f} GiB are free."
    )
    if dtype == torch.float32 and weights / 2 + activations < free:
        return MemoryPlanError(f"{text} Set --dtype bfloat16, which halves the weights.")
    if weights < free:
        return MemoryPlanError(f"{text} Lower --max-running (logits and activations shrink with it) or --token-budget.")
    return MemoryPlanError(f"{text} Choose a smaller model, or a machine with more memory.")
