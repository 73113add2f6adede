"""Builds an engine from a config: device, memory plan, weights, KV pool, scheduler."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import torch

from millrace.config import Config, allowed_processors
from millrace.engine.adapters.build import check_adapters, make_adapters
from millrace.engine.adapters.slots import Fill
from millrace.engine.adapters.store import parse_adapters
from millrace.engine.build_encoder import build_encoder_engine
from millrace.engine.constrained import ConstrainedRequests
from millrace.engine.disk.copier import DiskCopier
from millrace.engine.disk.open import disk_settings, open_disk
from millrace.engine.disk.others import OtherDisks
from millrace.engine.disk.store import BlockStore
from millrace.engine.drafting.find import DrafterSource, find_drafter
from millrace.engine.figures.step_figures import ModelWork
from millrace.engine.fingerprint import weights_digest
from millrace.engine.fronts.transfers import Transfers
from millrace.engine.grammars import make_grammars
from millrace.engine.loop import Engine
from millrace.engine.memory_plan import NO_DRAFTER, MemoryPlan, make_memory_plan
from millrace.engine.parts import EngineParts
from millrace.engine.ranks.check import check_device_ranks, check_encoder_ranks, check_ranks, rank_notes
from millrace.engine.ranks.group import RankGroup
from millrace.engine.ranks.mirror import Mirror
from millrace.engine.settings import retention_settings, runner_settings, scheduler_settings
from millrace.engine.state_memory import check_states
from millrace.engine.step_target import make_step_target, target_step_s
from millrace.errors import ConfigError
from millrace.host.free_memory import available_bytes
from millrace.link.channel import EngineChannel
from millrace.link.messages import EngineLoading, EngineReady
from millrace.models.adapters.shard import AdapterShard
from millrace.models.load import check_quantization, has_quantised_weights, load_decoder, weight_bytes
from millrace.models.spec.families import spec_from_config
from millrace.models.spec.model_spec import ModelSpec
from millrace.models.spec.shard import shard_of
from millrace.observe.slo.objective import parse_objectives
from millrace.ops.base.capability import gpu_notes
from millrace.ops.base.mesh import ONE_RANK
from millrace.ops.cpp.native import native_notes
from millrace.plan.drafting.control import MAX_DRAFTS
from millrace.plan.drafts import DraftSettings
from millrace.plan.kv.host_tier import HostTierSettings
from millrace.plan.scheduler import Scheduler, SchedulerSettings
from millrace.plan.shapes.choice import ShapeChoice
from millrace.run.device.defaults import DeviceDefaults
from millrace.run.device.device import Device, open_device, ranks_per_device
from millrace.run.device.kv_pool import bytes_per_token, resolve_kv_dtype
from millrace.run.device.precision import Precision, choose_precision
from millrace.run.device.token_placing import placing_objection
from millrace.run.drafting.drafter import DraftGuide
from millrace.run.drafting.drafters import AUTO, AUTO_TEXT, TEXT_DRAFTERS, offered_drafters
from millrace.run.graphs.kernel_build_pool import KernelBuildPool
from millrace.run.make import make_runner
from millrace.run.protocol import AnyRunner
from millrace.run.ranks.recorder import RankedRunner, RecordedRunner, RunnerSetup, StepRecorder
from millrace.run.ranks.slot_fills import recorded
from millrace.run.ranks.slot_pieces import RankedSlots
from millrace.run.runner import Runner
from millrace.run.sampling.processors import load_processor
from millrace.run.settings import RunnerSettings
from millrace.run.step_log import StepLog
from millrace.sources.encoders.families import is_encoder
from millrace.sources.resolve import ModelFiles, resolve_model
from millrace.version import __version__

if TYPE_CHECKING:
    from millrace.run.cuda_runner import CudaRunner

log = logging.getLogger(__name__)


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


@dataclass(frozen=True, slots=True)
class Beside:
    """What an engine has opened before its weights are loaded."""

    identity: str
    """Digest of what answers depend on."""
    store: BlockStore | None
    mirror: Mirror | None
    ranks: RankGroup | None

    def close(self) -> None:
        for opened in (self.mirror, self.ranks, self.store):
            if opened is not None:
                opened.close()


def build_engine(
    config: Config, channel: EngineChannel, build_pool: KernelBuildPool | None = None
) -> tuple[Engine, EngineReady]:
    """The engine, and the message that announces it. Raises on invalid settings before it allocates memory."""

    def on_loading(what: str, done: int, total: int) -> None:
        channel.send_all(EngineLoading(what, done, total))

    for name in allowed_processors(config):
        load_processor(name)
    check_ranks(config)
    files = resolve_model(config.model.source, progress=on_loading)
    if is_encoder(files.config):
        check_encoder_ranks(config)
        check_adapters(config, is_encoder=True)
        return build_encoder_engine(config, files, channel, on_loading)
    decided = _decide(config, files, on_loading)
    check_adapters(config, spec=decided.spec, progress=on_loading)
    identity = _identity(config, decided)
    store = open_disk(config, identity, decided.plan.block_bytes)
    mirror = Mirror(config) if config.plan.mirror else None
    ranks = RankGroup(config, decided.device) if config.run.tensor_parallel > 1 else None
    beside = Beside(identity, store, mirror, ranks)
    try:
        engine = _build_decoding(config, decided, beside, channel, build_pool, on_loading)
        return engine, _ready(config, decided, identity)
    except BaseException:
        beside.close()
        raise


def _build_decoding(
    config: Config,
    decided: Decided,
    beside: Beside,
    channel: EngineChannel,
    build_pool: KernelBuildPool | None,
    on_loading: Callable[[str, int, int], None],
) -> Engine:
    mirror, ranks, store = beside.mirror, beside.ranks, beside.store
    setup = _setup(config, decided, beside)
    mirrored = None if mirror is None else StepRecorder(mirror, setup)  # It loads meanwhile.
    ranked = None if ranks is None else StepRecorder(ranks, setup)
    constrained = ConstrainedRequests(make_grammars(decided.files, decided.spec.vocab_size))
    made = _load_runner(config, decided, constrained, build_pool, on_loading, ranks, ranked)
    runner: AnyRunner = made
    others = None
    if ranks is not None and ranked is not None:
        ranks.wait_until_ready(made.facts.shapes.digest)
        runner = RankedRunner(runner, ranked, ranks.mesh.check)
        if store is not None:
            others = OtherDisks(ranked, ranks.disk_replies, ranks.size - 1)
            if not others.are_usable:
                log.warning("no KV blocks are kept on a disk: a rank cannot store its part of them, and says why.")
                store.close()
                store = None
    recorders: list[StepRecorder] = []
    if config.plan.step_log:
        steps = StepLog(Path(config.plan.step_log).expanduser())
        recorders.append(StepRecorder(steps, msgspec.structs.replace(setup, shapes=made.facts.shapes.digest)))
    if mirror is not None and mirrored is not None:
        mirror.wait_until_ready(made.facts.shapes.digest)
        recorders.append(mirrored)
    for recorder in recorders:
        runner = RecordedRunner(runner, recorder)
    fill = _fill_of_slots(decided, made, ranked, recorders, num_ranks=config.run.tensor_parallel)
    stored = [] if store is None else store.stored()
    disk = disk_settings(store)
    settings = replace(
        decided.scheduler, disk_tier=disk, retention=retention_settings(config, decided.plan, below=disk.num_slots)
    )
    scheduler = Scheduler(settings, ShapeChoice(made.facts.shapes))
    if scheduler.tiers.disk is not None:
        scheduler.tiers.disk.restore(stored if others is None else others.common(stored))
    text = AUTO_TEXT if config.plan.speculate == AUTO else config.plan.speculate
    return Engine(
        scheduler,
        runner,
        decided.device,
        channel,
        facts=made.facts,
        parts=EngineParts(
            constrained=constrained,
            work=decided.work,
            has_figures=config.observe.figures,
            drafter=decided.drafter_kind or text,
            mirror=mirror,
            ranks=ranks,
            disk=None if store is None else DiskCopier(store, made.host_blocks, runner, others),
            adapters=lambda shares: make_adapters(
                config.adapters,
                decided.spec,
                decided.precision.dtype,
                fill,
                shares,
                device_bytes=decided.plan.adapter_bytes,
            ),
            shares_by_adapter=config.plan.share_by == "adapter",
            timed_adapters=frozenset(one.adapter for one in parse_objectives(config.observe.slos) if one.adapter),
            transfers=Transfers(
                scheduler.transfer,
                made.contents,
                identity=_digest(_model_identity(config, decided)),
                block_tokens=config.plan.block_size,
                refused=_why_blocks_stay(config, decided),
            ),
        ),
    )


def _fill_of_slots(
    decided: Decided,
    made: Runner | CudaRunner,
    ranked: StepRecorder | None,
    recorders: list[StepRecorder],
    *,
    num_ranks: int,
) -> Fill:
    """`recorders`: the step log and the mirror, which read the files of adapters themselves."""
    if ranked is None or made.slots is None:
        fill: Fill = made.fill_slot
    else:
        fill = RankedSlots(made, ranked, AdapterShard(shard_of(decided.spec, 0, num_ranks))).fill
    return recorded(fill, *recorders) if recorders else fill


def _why_blocks_stay(config: Config, decided: Decided) -> str:
    """Why prefixes cannot be exported and imported; empty if they can."""
    kept = "Blocks are not exported or imported "
    if config.run.tensor_parallel > 1:
        return kept + "with --tensor-parallel: each rank has a part of them."
    if config.plan.mirror or config.plan.step_log:
        return kept + "with --mirror or --step-log, which repeat every step from its plan."
    if decided.spec.recurrent is not None:
        return kept + "for models with recurrent states, which a prefix needs too."
    return "" if config.plan.prefix_cache else kept + "without --prefix-cache."


def build_runner(config: Config) -> tuple[Decided, Runner | CudaRunner]:
    """A runner without a loop around it, with all that was decided for it: what is measured, not served."""

    def on_loading(what: str, done: int, total: int) -> None: ...

    decided = _decide(config, resolve_model(config.model.source), on_loading)
    return decided, _load_runner(config, decided, None, None, on_loading)


def _decide(config: Config, files: ModelFiles, on_loading: Callable[[str, int, int], None]) -> Decided:
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


def _load_runner(
    config: Config,
    decided: Decided,
    guide: DraftGuide | None,
    build_pool: KernelBuildPool | None,
    on_loading: Callable[[str, int, int], None],
    ranks: RankGroup | None = None,
    ranked: StepRecorder | None = None,
) -> Runner | CudaRunner:
    """Load the weights and allocate the KV pool. With `ranks`, of rank 0, which tells its drafts to `ranked`."""
    decoder = load_decoder(
        decided.files,
        device=decided.device.torch_device,
        dtype=decided.precision.dtype,
        deterministic=config.run.deterministic,
        quantization=decided.precision.quantization,
        seed=config.model.seed,
        progress=lambda done, total: on_loading("weights", done, total),
        mesh=ONE_RANK if ranks is None else ranks.mesh,
    )
    drafter = None if decided.drafter is None else decided.drafter.load(decoder)
    tell_drafts = None if ranked is None else ranked.inputs
    return make_runner(decoder, decided.device, decided.runner, drafter, build_pool, guide, tell_drafts)


def _setup(config: Config, decided: Decided, beside: Beside) -> RunnerSetup:
    precision, settings, store = decided.precision, decided.runner, beside.store
    return RunnerSetup(
        model=config.model.source,
        dtype=str(precision.dtype).removeprefix("torch."),
        quantization=precision.quantization,
        seed=config.model.seed,
        deterministic=config.run.deterministic,
        kv_dtype=settings.kv_dtype,
        speculate=settings.speculate,
        num_blocks=settings.num_blocks,
        block_size=settings.block_size,
        max_rows=settings.max_rows,
        max_context=settings.max_context,
        token_budget=settings.token_budget,
        host_slots=settings.host_slots,
        max_copied=settings.max_copied,
        drafter=config.plan.drafter,
        state_places=settings.state_places,
        state_slots=settings.state_slots,
        graphs=settings.graphs,
        adapter_slots=settings.adapter_slots,
        all_states=settings.all_states,
        disk=beside.identity,
        disk_slots=0 if store is None else store.num_slots,
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


def model_work(spec: ModelSpec, weights_bytes: int, kv_token_bytes: int) -> ModelWork:
    return ModelWork(
        weights_bytes=weights_bytes,
        token_flops=2.0 * spec.active_parameters,
        context_bytes=kv_token_bytes,
        # Two products, each with two FLOPs per element of a head.
        pair_flops=4.0 * spec.q_size * spec.num_attention,
    )


def _identity(config: Config, decided: Decided) -> str:
    """Digest of what answers depend on."""
    identity = [__version__, torch.__version__, decided.device.name(), *_model_identity(config, decided)]
    if config.run.tensor_parallel > 1:  # Sums have another order.
        identity.append(f"ranks {config.run.tensor_parallel}")
    return _digest(identity)


def _ready(config: Config, decided: Decided, identity: str) -> EngineReady:
    files, spec, device, plan = decided.files, decided.spec, decided.device, decided.plan
    precision, measured = decided.precision, device.measured_limits(decided.precision.dtype)
    return EngineReady(
        model_name=config.model.served_name or files.name,
        max_context=plan.max_context,
        vocab_size=spec.vocab_size,
        kv_tokens=plan.kv_tokens,
        block_size=config.plan.block_size,
        dtype=str(precision.dtype).removeprefix("torch."),
        device=device.name(),
        memory_plan=plan.parts(),
        notes=(*rank_notes(config, device), *plan.notes, *precision.notes, *_device_notes(device)),
        num_parameters=spec.num_parameters,
        step_ms=1e3 * target_step_s(config, device.defaults),
        fingerprint="mr-" + identity[:12],
        drafters=offered_drafters(config.plan.speculate, device.defaults.pads_drafts, decided.drafter_kind),
        device_bytes_per_s=measured.bytes_per_s,
        device_flops=measured.flops,
        adapters=tuple(sorted(parse_adapters(config.adapters.adapters))) if config.adapters.num_slots else None,
        no_documents=_why_documents_stay(config, decided),
    )


def _why_documents_stay(config: Config, decided: Decided) -> str:
    """Why cached documents cannot be used at other positions, as a clause; empty if they can."""
    if not config.plan.prefix_cache:
        return "the engine runs without --prefix-cache"
    return placing_objection(decided.spec, has_drafter=decided.drafter is not None)


def _model_identity(config: Config, decided: Decided) -> list[str]:
    """What determines the keys and values of a text, up to rounding."""
    files, precision = decided.files, decided.precision
    parts = [str(precision.dtype).removeprefix("torch."), str(config.model.seed), precision.quantization]
    parts += [decided.plan.kv_dtype, json.dumps(files.config, sort_keys=True, default=str)]
    return [*parts, weights_digest(files.weights)]


def _digest(parts: list[str]) -> str:
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()


def _device_notes(device: Device) -> tuple[str, ...]:
    return (*native_notes(device.torch_device), *gpu_notes(device.torch_device))
