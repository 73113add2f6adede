"""What is decided of an engine before memory is allocated: device, precision, drafter, memory plan, settings."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from millrace.config import Config
from millrace.engine.decisions.settings import draft_settings, model_work, runner_settings, scheduler_settings
from millrace.engine.drafting.find import DrafterSource, find_drafter
from millrace.engine.figures.step_figures import ModelWork
from millrace.engine.memory_plan import NO_DRAFTER, MemoryPlan, make_memory_plan
from millrace.engine.ranks.check import check_device_ranks
from millrace.engine.state_memory import check_states
from millrace.engine.step_target import make_step_target, target_step_s
from millrace.host.free_memory import available_bytes
from millrace.models.load import check_quantization, has_quantised_weights, weight_bytes
from millrace.models.spec.families import spec_from_config
from millrace.models.spec.model_spec import ModelSpec
from millrace.models.spec.shard import shard_of
from millrace.plan.kv.host_tier import HostTierSettings
from millrace.plan.scheduler import SchedulerSettings
from millrace.run.device.device import Device, open_device, ranks_per_device
from millrace.run.device.kv_pool import bytes_per_token, resolve_kv_dtype
from millrace.run.device.precision import Precision, choose_precision
from millrace.run.settings import RunnerSettings
from millrace.sources.resolve import ModelFiles


@dataclass(frozen=True, slots=True)
class Decided:
    """What is decided before memory is allocated."""

    files: ModelFiles
    spec: ModelSpec
    """Of the whole model."""
    own: ModelSpec
    """Of rank 0's part, which is the largest."""
    device: Device
    precision: Precision
    drafter: DrafterSource | None
    plan: MemoryPlan
    runner: RunnerSettings
    scheduler: SchedulerSettings
    work: ModelWork

    @property
    def drafter_kind(self) -> str:
        return "" if self.drafter is None else self.drafter.kind


def decide(config: Config, files: ModelFiles, on_loading: Callable[[str, int, int], None]) -> Decided:
    spec = spec_from_config(files.config)
    device = open_device(config.run)
    precision = choose_precision(config.model, device, has_quantised_weights(files))
    dtype, place = precision.dtype, device.torch_device
    check_quantization(precision.quantization, place, dtype)
    kv_dtype = resolve_kv_dtype(
        config.memory.kv_dtype,
        spec,
        dtype=dtype,
        device=place,
        deterministic=config.run.deterministic,
        has_int8_products=precision.quantization == "int8",
    )
    num_ranks = config.run.tensor_parallel
    check_device_ranks(config, device)
    shard = None if num_ranks == 1 else shard_of(spec, 0, num_ranks)
    own = spec if shard is None else shard.spec
    num_processes = 2 if config.plan.mirror else num_ranks
    limits = device.limits()
    drafter = find_drafter(config, files, spec, precision.quantization, on_loading)
    check_states(spec, config.plan.speculate, drafter is not None)
    max_drafts = draft_settings(config, 1, device.defaults, drafter).max_drafts
    plan = make_memory_plan(
        config,
        own,
        device.defaults,
        dtype=dtype,
        weights_bytes=weight_bytes(files, dtype, precision.quantization, place, shard),
        free_bytes=device.free_bytes() // (2 if config.plan.mirror else ranks_per_device(device, num_ranks)),
        kv_dtype=kv_dtype,
        step_flops=limits.step_flops,
        host_free_bytes=available_bytes() // num_processes,
        drafter=NO_DRAFTER if drafter is None else drafter.memory(dtype, kv_dtype, place),
        state_places=1 + max_drafts,
    )
    host_tier = HostTierSettings(plan.host_slots, plan.block_bytes, plan.copy_batch_bytes)
    work = model_work(own, plan.weights_bytes, bytes_per_token(own, dtype, kv_dtype) * own.kv_groups.num_groups)
    target = make_step_target(target_step_s(config, device.defaults), own, limits, work)
    drafts = draft_settings(config, plan.max_running, device.defaults, drafter)
    return Decided(
        files=files,
        spec=spec,
        own=own,
        device=device,
        precision=precision,
        drafter=drafter,
        plan=plan,
        runner=runner_settings(config, plan, host_tier, drafter),
        scheduler=scheduler_settings(config, spec, plan, host_tier, drafts, target, work),
        work=work,
    )
