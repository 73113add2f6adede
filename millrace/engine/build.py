"""Builds an engine from a config: device, memory plan, weights, KV pool, scheduler."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import msgspec
import torch

from millrace.config import Config, allowed_processors
from millrace.engine.constrained import ConstrainedRequests
from millrace.engine.drafting.find import DrafterSource, find_drafter
from millrace.engine.figures.step_figures import StepWork
from millrace.engine.fingerprint import weights_digest
from millrace.engine.grammars import make_grammars
from millrace.engine.loop import Engine
from millrace.engine.memory_plan import NO_DRAFTER, MemoryPlan, make_memory_plan
from millrace.engine.step_target import make_step_target, target_step_s
from millrace.errors import ConfigError
from millrace.host.free_memory import available_bytes
from millrace.link.channel import EngineChannel
from millrace.link.messages import EngineLoading, EngineReady
from millrace.models.load import check_quantization, has_quantised_weights, load_decoder, weight_bytes
from millrace.models.spec.families import spec_from_config
from millrace.models.spec.model_spec import ModelSpec
from millrace.ops.cpp.native import native_notes
from millrace.plan.drafting.control import MAX_DRAFTS
from millrace.plan.drafts import DraftSettings
from millrace.plan.kv.groups import KvGroups
from millrace.plan.kv.host_tier import HostTierSettings
from millrace.plan.queue.policy import make_policy
from millrace.plan.scheduler import Scheduler
from millrace.plan.shapes.choice import make_shape_choice
from millrace.run.device.defaults import DeviceDefaults
from millrace.run.device.device import Device, open_device
from millrace.run.device.kv_pool import KvFormat, bytes_per_token, resolve_kv_dtype
from millrace.run.device.precision import Precision, choose_precision
from millrace.run.drafting.drafters import AUTO, AUTO_TEXT, TEXT_DRAFTERS, offered_drafters
from millrace.run.graphs.kernel_build_pool import KernelBuildPool
from millrace.run.make import make_runner
from millrace.run.runner import AnyRunner
from millrace.run.sampling.processors import load_processor
from millrace.run.settings import RunnerSettings
from millrace.run.step_log import LoggedRunner, RunnerSetup, StepLog
from millrace.sources.resolve import ModelFiles, resolve_model
from millrace.version import __version__


def build_engine(
    config: Config, channel: EngineChannel, build_pool: KernelBuildPool | None = None
) -> tuple[Engine, EngineReady]:
    """The engine, and the message that announces it. Raises on invalid settings before it allocates memory."""

    for name in allowed_processors(config):
        load_processor(name)

    def on_loading(what: str, done: int, total: int) -> None:
        channel.send_all(EngineLoading(what, done, total))

    files = resolve_model(config.model.source, progress=on_loading)
    spec = spec_from_config(files.config)
    device = open_device(config.run)
    precision = choose_precision(config.model, device, has_quantised_weights(files))
    dtype = precision.dtype
    check_quantization(precision.quantization, device.torch_device, dtype)
    kv_dtype = resolve_kv_dtype(
        config.memory.kv_dtype,
        spec,
        dtype=dtype,
        device=device.torch_device,
        deterministic=config.run.deterministic,
        has_int8_products=precision.quantization == "int8",
    )
    limits = device.limits()
    drafter = find_drafter(config, files, spec, precision.quantization, on_loading)
    plan = make_memory_plan(
        config,
        spec,
        device.defaults,
        dtype=dtype,
        weights_bytes=weight_bytes(files, dtype, precision.quantization, device.torch_device),
        free_bytes=device.free_bytes(),
        kv_dtype=kv_dtype,
        step_flops=limits.step_flops,
        host_free_bytes=available_bytes(),
        drafter=NO_DRAFTER if drafter is None else drafter.memory(dtype, kv_dtype, device.torch_device),
    )
    drafts = draft_settings(config, plan.max_running, device.defaults, drafter)
    host_tier = HostTierSettings(plan.host_slots, plan.block_bytes, plan.copy_batch_bytes)
    decoder = load_decoder(
        files,
        device=device.torch_device,
        dtype=dtype,
        deterministic=config.run.deterministic,
        quantization=precision.quantization,
        seed=config.model.seed,
        progress=lambda done, total: on_loading("weights", done, total),
    )
    made = make_runner(
        decoder,
        device,
        RunnerSettings(
            num_blocks=plan.num_blocks,
            block_size=config.plan.block_size,
            max_rows=plan.max_running,
            max_context=plan.max_context,
            token_budget=plan.token_budget,
            kv_dtype=kv_dtype,
            speculate=config.plan.speculate,
            host_slots=host_tier.num_slots,
            max_copied=host_tier.max_blocks,
            graphs=config.run.graphs,
        ),
        None if drafter is None else drafter.load(decoder),
        build_pool,
    )
    runner: AnyRunner = made
    kv_token_bytes = bytes_per_token(spec, dtype, kv_dtype) * spec.kv_groups.num_groups
    if config.plan.step_log:
        setup = _setup(config, plan, precision, kv_dtype, host_tier)
        runner = LoggedRunner(made, StepLog(Path(config.plan.step_log).expanduser(), setup))
    target = make_step_target(
        target_step_s(config, device.defaults),
        spec,
        limits,
        weights_bytes=plan.weights_bytes,
        kv_token_bytes=kv_token_bytes,
    )
    scheduler = Scheduler(
        num_blocks=plan.num_blocks,
        block_size=config.plan.block_size,
        max_running=plan.max_running,
        token_budget=plan.token_budget,
        mixed_budget=plan.mixed_budget,
        target=target,
        prefix_cache=config.plan.prefix_cache,
        policy=make_policy(config.plan.policy),
        static_batching=config.plan.batching == "static",
        aging_s=config.plan.aging_s,
        drafts=drafts,
        groups=KvGroups(spec.kv_groups.windows),
        host_tier=host_tier,
        shapes=make_shape_choice(made.facts.shapes),
    )
    measured = device.measured_limits(dtype)
    kind = "" if drafter is None else drafter.kind
    ready = msgspec.structs.replace(
        _ready(config, files, spec, precision, device, plan),
        drafters=offered_drafters(config.plan.speculate, device.defaults.pads_drafts, kind),
        device_bytes_per_s=measured.bytes_per_s,
        device_flops=measured.flops,
    )
    constrained = ConstrainedRequests(make_grammars(files, spec.vocab_size))
    work = step_work(spec, plan.weights_bytes, kv_token_bytes)
    has_figures = config.observe.figures
    text = AUTO_TEXT if config.plan.speculate == AUTO else config.plan.speculate
    engine = Engine(
        *(scheduler, runner, device, channel),
        facts=made.facts,
        constrained=constrained,
        work=work,
        has_figures=has_figures,
        drafter=kind or text,
    )
    return engine, ready


def _setup(
    config: Config, plan: MemoryPlan, precision: Precision, kv_dtype: KvFormat, host_tier: HostTierSettings
) -> RunnerSetup:
    return RunnerSetup(
        model=config.model.source,
        dtype=str(precision.dtype).removeprefix("torch."),
        quantization=precision.quantization,
        seed=config.model.seed,
        deterministic=config.run.deterministic,
        kv_dtype=kv_dtype,
        speculate=config.plan.speculate,
        num_blocks=plan.num_blocks,
        block_size=config.plan.block_size,
        max_rows=plan.max_running,
        max_context=plan.max_context,
        token_budget=plan.token_budget,
        host_slots=host_tier.num_slots,
        max_copied=host_tier.max_blocks,
        drafter=config.plan.drafter,
    )


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


def step_work(spec: ModelSpec, weights_bytes: int, kv_token_bytes: int) -> StepWork:
    return StepWork(
        weights_bytes=weights_bytes,
        token_flops=2.0 * spec.active_parameters,
        context_bytes=kv_token_bytes,
        # Two products, each with two FLOPs per element of a head.
        pair_flops=4.0 * spec.q_size * spec.num_layers,
    )


def _ready(
    config: Config, files: ModelFiles, spec: ModelSpec, precision: Precision, device: Device, plan: MemoryPlan
) -> EngineReady:
    dtype_name = str(precision.dtype).removeprefix("torch.")
    identity = [__version__, torch.__version__, dtype_name, device.name(), str(config.model.seed)]
    identity += [precision.quantization, plan.kv_dtype, json.dumps(files.config, sort_keys=True, default=str)]
    identity.append(weights_digest(files.weights))
    return EngineReady(
        model_name=config.model.served_name or files.name,
        max_context=plan.max_context,
        vocab_size=spec.vocab_size,
        kv_tokens=plan.kv_tokens,
        block_size=config.plan.block_size,
        dtype=dtype_name,
        device=device.name(),
        memory_plan=plan.parts(),
        notes=(*plan.notes, *precision.notes, *native_notes(device.torch_device)),
        num_parameters=spec.num_parameters,
        step_ms=1e3 * target_step_s(config, device.defaults),
        fingerprint="mr-" + hashlib.sha256("\n".join(identity).encode()).hexdigest()[:12],
    )
