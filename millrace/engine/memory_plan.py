"""The memory plan: sizes of weights, activations and KV pool, decided before anything is allocated.

If the parts do not fit, the error names the setting to change and a value for it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from millrace.config import Config
from millrace.engine.state_memory import NO_STATES, StateMemory, make_state_memory, rows_with_states
from millrace.engine.step_target import target_step_s
from millrace.errors import MemoryPlanError
from millrace.models.adapters.targets import targets_of
from millrace.models.spec.model_spec import ModelSpec
from millrace.plan.kv.groups import KvGroups
from millrace.run.device.defaults import DeviceDefaults
from millrace.run.device.kv_pool import KvKind, kv_specs
from millrace.run.settings import KvFormat

GIB = 1 << 30
MIN_KV_TOKENS = 256
PADDING_STATES = 1
"""Rows of the state pool beside those of requests (`run/device/state_pool.py`)."""
SMOOTH_SHARE = 0.5
"""The default mixed budget fills this share of a step's target time; the rest is for decode rows and context."""
USUAL_RANK, MAX_ADAPTER_SHARE = 16, 0.1
"""Memory for adapters on a GPU: of this rank in every slot, but at most this share of what the weights leave."""
MAX_HOST_SHARE = 0.9
"""Maximum share of the machine's free memory for KV blocks in host memory."""


@dataclass(frozen=True, slots=True)
class DrafterMemory:
    """What a drafter that is a model needs beside the target."""

    weights_bytes: int = 0
    block_token_bytes: int = 0
    """Keys and values of one token: a part of every block."""
    spec: ModelSpec | None = None
    """Its size as a decoder, if it is one: for its activations."""
    tap_width: int = 0
    """Numbers that it reads of each token inside the target (EAGLE-3)."""
    kept_width: int = 0
    """Numbers of the target's last states that are kept for each row's next drafts."""


NO_DRAFTER = DrafterMemory()


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    weights_bytes: int
    """Of the target alone."""
    activation_bytes: int
    kv_bytes: int
    kv_dtype: KvFormat
    kv_kind: KvKind
    kv_tokens: int
    """Tokens that one long request can have in the pool."""
    num_blocks: int
    max_context: int
    max_running: int
    token_budget: int
    mixed_budget: int
    free_bytes: int
    """Of the device's memory, before anything is allocated."""
    block_bytes: int
    host_slots: int = 0
    """KV blocks that host memory holds beside the pool."""
    copy_batch_bytes: int = 0
    """Size of a batch of copies between the pool and host memory."""
    drafter: DrafterMemory = NO_DRAFTER
    history_bytes: int = 0
    """The column of every row's tokens, if the device drafts from one."""
    states: StateMemory = NO_STATES
    adapter_bytes: int = 0
    """For the adapters in all slots, on a device with memory of its own."""
    notes: tuple[str, ...] = ()
    """What was chosen automatically, why, and the settings that change it."""

    def parts(self) -> dict[str, int]:
        """Bytes by part, with readable names. The KV pool's name includes its dtype unless it is the model's."""
        kv_dtype = "" if self.kv_kind == "keys and values" else f" of {self.kv_kind}"
        kv_dtype += "" if self.kv_dtype == "full" else f", {self.kv_dtype}"
        if self.drafter.block_token_bytes:
            kv_dtype += ", the drafter's included"
        parts = {"weights": self.weights_bytes}
        if self.drafter.weights_bytes:
            parts["weights of the drafter"] = self.drafter.weights_bytes
        if self.history_bytes:
            parts["tokens of all rows, for drafts"] = self.history_bytes
        if self.states.row_bytes:
            parts["recurrent states of all rows"] = self.states.row_bytes
            parts[f"checkpoints of states, {self.states.num_slots:,}"] = self.states.slot_bytes
        if self.adapter_bytes:
            parts["adapters"] = self.adapter_bytes
        parts |= {
            "activations, worst step": self.activation_bytes,
            f"KV pool, {self.kv_tokens:,} tokens{kv_dtype}": self.kv_bytes,
        }
        left = {"left free": self.free_bytes - sum(parts.values())}
        if not self.host_slots:
            return parts | left
        return parts | left | {f"KV in host memory, {self.host_slots:,} blocks": self.host_slots * self.block_bytes}


def make_memory_plan(
    config: Config,
    spec: ModelSpec,
    defaults: DeviceDefaults,
    *,
    dtype: torch.dtype,
    weights_bytes: int,
    free_bytes: int,
    kv_dtype: KvFormat = "full",
    step_flops: float = 0.0,
    host_free_bytes: int = 0,
    drafter: DrafterMemory = NO_DRAFTER,
    state_places: int = 1,
) -> MemoryPlan:
    """`step_flops` is the FLOP/s that whole steps reach (`DeviceLimits`); 0 if unknown. `host_free_bytes`: free memory
    of the machine, of which a device with memory of its own uses what `kv_host_gib` says. `state_places`: tokens that a
    row may draw in one step."""
    free_bytes = max(0, free_bytes - int(config.memory.reserved_gib * GIB))
    max_running = rows_with_states(config, spec, dtype, state_places, free_bytes, _max_running(config, defaults))
    token_budget, mixed_budget = _budgets(config, spec, defaults, max_running, step_flops)
    max_context = _max_context(config, spec)
    activation_bytes = _activation_bytes(spec, config, defaults, max_running, token_budget, dtype, drafter)
    block_size = config.plan.block_size
    kv = kv_specs(spec, block_size, dtype, kv_dtype)
    groups = KvGroups(tuple(own.window for own in kv))
    block_bytes = kv[0].block_bytes + drafter.block_token_bytes * block_size
    host_slots = _host_slots(config, block_bytes)
    batch_bytes = max(block_bytes, defaults.copy_batch_bytes) if host_slots else 0
    if host_slots and defaults.has_own_memory:
        _free_beside_host_blocks(config, host_free_bytes)
        activation_bytes += 2 * batch_bytes  # a buffer for each direction
    elif host_slots:
        free_bytes = _free_beside_host_blocks(config, free_bytes)
    all_weights = weights_bytes + drafter.weights_bytes
    history_bytes = _history_bytes(config, max_running, max_context, defaults)
    states = make_state_memory(
        config, spec, dtype, max_running + PADDING_STATES, state_places, free_bytes - all_weights
    )
    adapter_bytes = _adapter_bytes(config, spec, defaults, dtype, free_bytes - all_weights)
    fixed = all_weights + activation_bytes + history_bytes + states.row_bytes + states.slot_bytes + adapter_bytes
    if fixed + groups.blocks_for(MIN_KV_TOKENS, block_size) * block_bytes > free_bytes:
        raise _too_big(spec, dtype, all_weights, fixed - all_weights, free_bytes)
    most_useful = _most_useful_blocks(config, defaults, groups, max_running, max_context)
    num_blocks = _num_blocks(config, defaults, free_bytes - fixed, block_bytes, groups, most_useful)
    _check_pool(num_blocks * block_bytes, fixed, free_bytes)
    kv_tokens = groups.tokens_in(num_blocks, block_size, most=max_running * max_context)
    fitting_context = _fitting_context(config, max_context, kv_tokens)
    return MemoryPlan(
        weights_bytes=weights_bytes,
        activation_bytes=activation_bytes,
        kv_bytes=num_blocks * block_bytes,
        kv_dtype=kv_dtype,
        kv_kind=kv[0].kind,
        kv_tokens=kv_tokens,
        num_blocks=num_blocks,
        max_context=fitting_context,
        max_running=max_running,
        token_budget=token_budget,
        mixed_budget=mixed_budget,
        free_bytes=free_bytes,
        block_bytes=block_bytes,
        host_slots=host_slots,
        copy_batch_bytes=batch_bytes,
        drafter=drafter,
        history_bytes=history_bytes,
        states=states,
        adapter_bytes=adapter_bytes,
        notes=tuple(_notes(config, defaults, kv_tokens, num_blocks * block_bytes, max_context, fitting_context)),
    )


def _most_useful_blocks(
    config: Config, defaults: DeviceDefaults, groups: KvGroups, max_running: int, max_context: int
) -> int:
    """More are of no use: so many rows of the longest context, or what the device keeps by default."""
    block_size = config.plan.block_size
    blocks = max_running * groups.blocks_for(max_context, block_size)
    if defaults.max_kv_tokens is None or config.memory.fraction:
        return blocks
    return min(blocks, groups.blocks_for(max(defaults.max_kv_tokens, max_context), block_size))


def _check_pool(pool_bytes: int, fixed_bytes: int, free_bytes: int) -> None:
    if fixed_bytes + pool_bytes > free_bytes:
        fits = (free_bytes - fixed_bytes) / GIB
        raise MemoryPlanError(
            f"The KV pool needs {pool_bytes / GIB:.2f} GiB, but only {fits:.2f} GiB are free beside weights and"
            f" activations ({fixed_bytes / GIB:.2f} GiB). Set --kv-gib {fits * 0.9:.2f} or less."
        )


def _is_pool_automatic(config: Config) -> bool:
    return not config.memory.kv_tokens and not config.memory.kv_gib


def _fitting_context(config: Config, max_context: int, kv_tokens: int) -> int:
    """The context, shortened to what an automatic pool holds unless the user asked for this context."""
    if config.model.max_context or not _is_pool_automatic(config):
        return max_context
    return min(max_context, kv_tokens)


def _notes(
    config: Config, defaults: DeviceDefaults, kv_tokens: int, kv_bytes: int, max_context: int, fitting_context: int
) -> Iterator[str]:
    if _is_pool_automatic(config):
        reason = f"at most {config.memory.fraction or defaults.kv_fraction:.0%} of the free memory"
        limit = None if config.memory.fraction else defaults.max_kv_tokens
        if limit is not None and kv_tokens >= max(limit, max_context):
            reason = f"enough for {kv_tokens // 1024:,} requests of 1,024 tokens at once"
        yield f"KV pool: {kv_bytes / GIB:.1f} GiB, {reason}. More or less: --kv-gib or --kv-tokens."
    if fitting_context < max_context:
        yield (
            f"Context: {fitting_context:,} tokens instead of the model's {max_context:,}, because the KV pool holds no"
            " more. For more, raise --kv-gib, or store KV smaller with --kv-dtype int8 (CPU) or fp8 (GPU)."
        )


def _host_slots(config: Config, block_bytes: int) -> int:
    return int(config.memory.kv_host_gib * GIB) // block_bytes


def _free_beside_host_blocks(config: Config, free_bytes: int) -> int:
    """Bytes of the machine's free memory that are left."""
    wanted = int(config.memory.kv_host_gib * GIB)
    if wanted > free_bytes * MAX_HOST_SHARE:
        raise MemoryPlanError(
            f"memory.kv_host_gib is {wanted / GIB:.2f} GiB, but the machine has {free_bytes / GIB:.2f} GiB free."
            f" Set --kv-host-gib {free_bytes * MAX_HOST_SHARE / GIB:.2f} or less."
        )
    return free_bytes - wanted


def _max_running(config: Config, defaults: DeviceDefaults) -> int:
    """The setting, or the device's default, which an explicit token budget limits: decoding rows come on top of the
    budget, and a small budget is chosen to keep steps short."""
    default = defaults.max_running
    return config.plan.max_running or min(default, config.plan.token_budget or default)


def _budgets(
    config: Config, spec: ModelSpec, defaults: DeviceDefaults, max_running: int, step_flops: float
) -> tuple[int, int]:
    """Token budget (decoding rows not counted) and mixed budget (all tokens of a step that decodes). The default token
    budget is at least the number of rows, so decoding rows at most double it."""
    token_budget = config.plan.token_budget or max(defaults.token_budget, max_running)
    return token_budget, min(
        config.plan.mixed_budget or _smooth_budget(config, spec, defaults, step_flops), token_budget
    )


def _smooth_budget(config: Config, spec: ModelSpec, defaults: DeviceDefaults, step_flops: float) -> int:
    """Tokens that the device computes in a step that also decodes, at 2 FLOPs per active parameter and token."""
    smooth_s = SMOOTH_SHARE * (target_step_s(config, defaults) or defaults.step_ms / 1e3)
    tokens = smooth_s * step_flops / (2 * spec.active_parameters)
    return max(defaults.min_mixed_budget, min(defaults.token_budget, int(tokens) // 1024 * 1024))


def _max_context(config: Config, spec: ModelSpec) -> int:
    requested, limit = config.model.max_context, spec.max_context
    if requested > limit:
        raise MemoryPlanError(f"model.max_context is {requested}, but the model supports {limit}; set at most {limit}.")
    return requested or limit


def _num_blocks(
    config: Config, defaults: DeviceDefaults, left: int, block_bytes: int, groups: KvGroups, most_useful: int
) -> int:
    """Blocks of the KV pool, by the settings or by the free memory that is `left`."""
    memory = config.memory
    if memory.kv_tokens:
        return max(1, memory.kv_tokens // config.plan.block_size) * groups.num_groups
    if memory.kv_gib:
        return max(1, int(memory.kv_gib * GIB) // block_bytes)
    fraction = memory.fraction or defaults.kv_fraction
    # Never more than all rows at full context can use.
    return max(1, min(int(left * fraction) // block_bytes, most_useful))


def _activation_bytes(
    spec: ModelSpec,
    config: Config,
    defaults: DeviceDefaults,
    max_running: int,
    token_budget: int,
    dtype: torch.dtype,
    drafter: DrafterMemory,
) -> int:
    """Upper bound on a step's memory beside weights and KV pool, the states that a drafter reads included: those inside
    the target, of all tokens of a step, and the last ones of each row."""
    max_tokens = token_budget + max_running
    worst = _worst_step_bytes(spec, max_running, max_tokens, dtype)
    graphs = defaults.graphs_bytes
    if drafter.spec is not None:
        worst += _worst_step_bytes(drafter.spec, max_running, max_tokens, dtype)
        graphs *= 2
    worst += max_tokens * drafter.tap_width * dtype.itemsize
    places = config.plan.block_size + 1 if defaults.kept_places is None else defaults.kept_places
    kept = (max_running + defaults.padding_rows) * places * drafter.kept_width * dtype.itemsize
    return defaults.num_activations * worst + graphs + kept


def _worst_step_bytes(spec: ModelSpec, max_running: int, max_tokens: int, dtype: torch.dtype) -> int:
    """Live activations and float32 logits."""
    widest_mlp = max(spec.inner_size, spec.moe.inner_size * spec.moe.top_k if spec.moe is not None else 0)
    qkv = spec.q_size + 2 * spec.kv_size
    per_token = 4 * spec.hidden_size + 2 * qkv + 3 * widest_mlp
    logits = max_running * spec.vocab_size * 4
    # Sampling holds scaled logits, their softmax and a float64 cumulative sum at once; penalties hold a count and a
    # mark per vocabulary token and row.
    return max_tokens * per_token * max(dtype.itemsize, 4) + 5 * logits + 5 * logits // 4


def _adapter_bytes(
    config: Config, spec: ModelSpec, defaults: DeviceDefaults, dtype: torch.dtype, left_bytes: int
) -> int:
    """As many adapters as there are slots, of a usual rank and with all linears, or a share of what the weights leave;
    at least one adapter of the largest rank. Elsewhere slots name the matrices in host memory."""
    if not config.adapters.num_slots or not defaults.has_own_memory:
        return 0
    linears = [linear for linear in targets_of(spec).linears if linear is not None]
    per_rank = sum(len(own.out_sizes) * own.in_features + sum(own.out_sizes) for own in linears) * dtype.itemsize
    wanted = min(config.adapters.num_slots * USUAL_RANK * per_rank, int(left_bytes * MAX_ADAPTER_SHARE))
    return max(wanted, config.adapters.max_lora_rank * per_rank)


def _history_bytes(config: Config, max_running: int, max_context: int, defaults: DeviceDefaults) -> int:
    """The column `history` of `DeviceDrafts`, in which each row has a place behind its context. An upper bound if the
    KV pool shortens the context."""
    if not defaults.keeps_history or config.plan.speculate == "off":
        return 0
    return (max_running + defaults.padding_rows) * (max_context + 1) * 4


def _too_big(spec: ModelSpec, dtype: torch.dtype, weights: int, activations: int, free: int) -> MemoryPlanError:
    text = (
        f"The model does not fit: weights {weights / GIB:.2f} GiB and activations {activations / GIB:.2f} GiB,"
        f" but {free / GIB:.2f} GiB are free."
    )
    if dtype == torch.float32 and weights / 2 + activations < free:
        return MemoryPlanError(f"{text} Set --dtype bfloat16, which halves the weights.")
    if weights < free:
        return MemoryPlanError(f"{text} Lower --max-running or --token-budget, which shrinks the activations.")
    return MemoryPlanError(f"{text} Choose a smaller model or a machine with more memory.")
