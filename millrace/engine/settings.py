"""Settings of the runner and the scheduler, from those of the user and the memory plan."""

from __future__ import annotations

from millrace.config import Config
from millrace.engine.drafting.find import DrafterSource
from millrace.engine.figures.step_figures import ModelWork
from millrace.engine.memory_plan import MemoryPlan
from millrace.models.spec.model_spec import ModelSpec
from millrace.plan.budget import StepTarget
from millrace.plan.drafts import DraftSettings
from millrace.plan.kv.eviction import EvictionSettings
from millrace.plan.kv.groups import KvGroups
from millrace.plan.kv.host_tier import HostTierSettings
from millrace.plan.kv.retention import RetentionSettings
from millrace.plan.scheduler import SchedulerSettings
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
