"""Settings of the runner and the scheduler, from a config and its memory plan."""

from __future__ import annotations

from millrace.config import Config
from millrace.engine.drafting.find import DrafterSource
from millrace.engine.figures.step_figures import ModelWork
from millrace.engine.memory_plan import MemoryPlan
from millrace.errors import ConfigError
from millrace.models.spec.model_spec import ModelSpec
from millrace.plan.budget import StepTarget
from millrace.plan.drafting.control import MAX_DRAFTS
from millrace.plan.drafts import DraftSettings
from millrace.plan.kv.eviction import EvictionSettings
from millrace.plan.kv.groups import KvGroups
from millrace.plan.kv.host_tier import HostTierSettings
from millrace.plan.kv.retention import RetentionSettings
from millrace.plan.scheduler import SchedulerSettings
from millrace.run.device.defaults import DeviceDefaults
from millrace.run.drafting.drafters import AUTO, TEXT_DRAFTERS
from millrace.run.settings import RunnerSettings


def runner_settings(
    config: Config, plan: MemoryPlan, host_tier: HostTierSettings, drafter: DrafterSource | None
) -> RunnerSettings:
    return RunnerSettings(
        num_blocks=plan.num_blocks,
        block_size=config.plan.block_size,
        max_rows=plan.max_running,
        max_context=plan.max_context,
        token_budget=plan.token_budget,
        kv_dtype=plan.kv_dtype,
        speculate=config.plan.speculate,
        host_slots=host_tier.num_slots,
        max_copied=host_tier.max_blocks,
        state_places=plan.states.num_places,
        state_slots=plan.states.num_slots,
        graphs=config.run.graphs,
        adapter_slots=config.adapters.num_slots,
        all_states=config.run.tensor_parallel > 1 and drafter is not None and drafter.reads_all_states,
    )


def scheduler_settings(
    config: Config,
    spec: ModelSpec,
    plan: MemoryPlan,
    host_tier: HostTierSettings,
    drafts: DraftSettings,
    target: StepTarget | None,
    work: ModelWork,
) -> SchedulerSettings:
    column_cost = config.plan.block_size * work.pair_flops / max(work.token_flops, 1.0)
    return SchedulerSettings(
        num_blocks=plan.num_blocks,
        block_size=config.plan.block_size,
        max_running=plan.max_running,
        token_budget=plan.token_budget,
        mixed_budget=plan.mixed_budget,
        target=target,
        prefix_cache=config.plan.prefix_cache,
        policy=config.plan.policy,
        static_batching=config.plan.batching == "static",
        aging_s=config.plan.aging_s,
        drafts=drafts,
        groups=KvGroups(spec.kv_groups.windows),
        state_slots=None if spec.recurrent is None else plan.states.num_slots,
        state_bytes=plan.states.each_bytes,
        host_tier=host_tier,
        eviction=EvictionSettings(config.memory.kv_eviction, column_cost),
        retention=retention_settings(config, plan),
    )


def retention_settings(config: Config, plan: MemoryPlan, below: int = 0) -> RetentionSettings:
    """`below`: blocks that the disk holds."""
    num_blocks = plan.num_blocks + plan.host_slots + below
    return RetentionSettings(int(config.memory.kv_retained * num_blocks), plan.block_bytes)


def draft_settings(
    config: Config, max_running: int, defaults: DeviceDefaults, drafter: DrafterSource | None = None
) -> DraftSettings:
    """A step verifies at most as many tokens as it may have rows: buffers exist for that many. Without padding a
    drafter with fewer drafts leaves places unused."""
    speculate, fixed = config.plan.speculate, config.plan.draft_tokens
    if speculate == "off":
        return DraftSettings()
    most, pads = min(MAX_DRAFTS, defaults.max_drafts or MAX_DRAFTS), defaults.pads_drafts
    if fixed > most:
        message = f"--draft-tokens is {fixed}; this device verifies at most {most} per step."
        raise ConfigError(message, param="draft_tokens")
    has_one_source = pads or speculate != AUTO
    if drafter is not None and drafter.max_drafts is not None and has_one_source:
        if fixed > drafter.max_drafts:
            raise ConfigError(
                f"--draft-tokens is {fixed}; the drafter has {drafter.max_drafts} heads, one for each draft. Set"
                f" --draft-tokens {drafter.max_drafts} or less.",
                param="draft_tokens",
            )
        most = min(most, drafter.max_drafts) if pads else most
    return DraftSettings(
        max_drafts=fixed or min(config.plan.max_drafts, most),
        max_places=max_running,
        is_fixed=bool(fixed),
        is_padded=pads,
        is_weighed=not pads and speculate in (AUTO, *TEXT_DRAFTERS),
        has_trained=drafter is not None and speculate == AUTO and not pads,
    )


def model_work(spec: ModelSpec, weights_bytes: int, kv_token_bytes: int) -> ModelWork:
    return ModelWork(
        weights_bytes=weights_bytes,
        token_flops=2.0 * spec.active_parameters,
        context_bytes=kv_token_bytes,
        # Two products, each with two FLOPs per element of a head.
        pair_flops=4.0 * spec.q_size * spec.num_attention,
    )
