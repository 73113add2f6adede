"""Builds an engine from a config: device, memory plan, weights, KV pool, scheduler."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from millrace.config import Config, allowed_processors
from millrace.engine.adapters.build import check_adapters, make_adapters
from millrace.engine.adapters.slots import Fill
from millrace.engine.build_encoder import build_encoder_engine
from millrace.engine.constrained import ConstrainedRequests
from millrace.engine.decisions.announcement import digest, identity_of, model_identity, ready_message
from millrace.engine.decisions.decide import Decided, decide
from millrace.engine.decisions.settings import retention_settings
from millrace.engine.disk.copier import DiskCopier
from millrace.engine.disk.open import disk_settings, open_disk
from millrace.engine.disk.others import OtherDisks
from millrace.engine.disk.store import BlockStore
from millrace.engine.fronts.transfers import Transfers
from millrace.engine.grammars import make_grammars
from millrace.engine.loop import Engine
from millrace.engine.parts import EngineParts
from millrace.engine.ranks.check import check_encoder_ranks, check_ranks
from millrace.engine.ranks.group import RankGroup
from millrace.engine.ranks.mirror import Mirror
from millrace.link.channel import EngineChannel
from millrace.link.messages import EngineLoading, EngineReady
from millrace.models.adapters.shard import AdapterShard
from millrace.models.load import load_decoder
from millrace.models.spec.shard import shard_of
from millrace.observe.slo.objective import parse_objectives
from millrace.ops.base.mesh import ONE_RANK
from millrace.plan.scheduler import Scheduler
from millrace.plan.shapes.choice import ShapeChoice
from millrace.run.drafting.drafter import DraftGuide
from millrace.run.drafting.drafters import AUTO, AUTO_TEXT
from millrace.run.graphs.kernel_build_pool import KernelBuildPool
from millrace.run.make import make_runner
from millrace.run.protocol import AnyRunner
from millrace.run.ranks.recorder import RankedRunner, RecordedRunner, RunnerSetup, StepRecorder
from millrace.run.ranks.slot_fills import recorded
from millrace.run.ranks.slot_pieces import RankedSlots
from millrace.run.runner import Runner
from millrace.run.sampling.processors import load_processor
from millrace.run.step_log import StepLog
from millrace.sources.encoders.families import is_encoder
from millrace.sources.resolve import resolve_model

if TYPE_CHECKING:
    from millrace.run.cuda_runner import CudaRunner

log = logging.getLogger(__name__)


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
    decided = decide(config, files, on_loading)
    check_adapters(config, spec=decided.spec, progress=on_loading)
    identity = identity_of(config, decided)
    store = open_disk(config, identity, decided.plan.block_bytes)
    mirror = Mirror(config) if config.plan.mirror else None
    ranks = RankGroup(config, decided.device) if config.run.tensor_parallel > 1 else None
    beside = Beside(identity, store, mirror, ranks)
    try:
        engine = _build_decoding(config, decided, beside, channel, build_pool, on_loading)
        return engine, ready_message(config, decided, identity)
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
    recorders = _recorders(config, setup, made.facts.shapes.digest, mirror, mirrored)
    for recorder in recorders:
        runner = RecordedRunner(runner, recorder)
    fill = _fill_of_slots(decided, made, ranked, recorders, num_ranks=config.run.tensor_parallel)
    scheduler = _make_scheduler(config, decided, ShapeChoice(made.facts.shapes), store, others)
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
            transfers=_transfers(config, decided, scheduler, made),
        ),
    )


def _recorders(
    config: Config, setup: RunnerSetup, shapes_digest: str, mirror: Mirror | None, mirrored: StepRecorder | None
) -> list[StepRecorder]:
    """Of the step log and of the mirror, once it is ready."""
    recorders: list[StepRecorder] = []
    if config.plan.step_log:
        steps = StepLog(Path(config.plan.step_log).expanduser())
        recorders.append(StepRecorder(steps, msgspec.structs.replace(setup, shapes=shapes_digest)))
    if mirror is not None and mirrored is not None:
        mirror.wait_until_ready(shapes_digest)
        recorders.append(mirrored)
    return recorders


def _make_scheduler(
    config: Config, decided: Decided, shapes: ShapeChoice, store: BlockStore | None, others: OtherDisks | None
) -> Scheduler:
    """It begins with the blocks that are on the disk, with ranks on all their disks."""
    disk = disk_settings(store)
    retention = retention_settings(config, decided.plan, below=disk.num_slots)
    scheduler = Scheduler(replace(decided.scheduler, disk_tier=disk, retention=retention), shapes)
    if scheduler.tiers.disk is not None:
        stored = [] if store is None else store.stored()
        scheduler.tiers.disk.restore(stored if others is None else others.common(stored))
    return scheduler


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


def _transfers(config: Config, decided: Decided, scheduler: Scheduler, made: Runner | CudaRunner) -> Transfers:
    return Transfers(
        scheduler.transfer,
        made.contents,
        identity=digest(model_identity(config, decided)),
        block_tokens=config.plan.block_size,
        refused=_why_blocks_stay(config, decided),
    )


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

    decided = decide(config, resolve_model(config.model.source), on_loading)
    return decided, _load_runner(config, decided, None, None, on_loading)


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
