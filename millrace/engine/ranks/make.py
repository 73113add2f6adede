"""Makes the runner of another rank: like that of rank 0, from what that has recorded of its own."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
import torch

from millrace.config import Config, ModelConfig, PlanConfig, Quantization, RunConfig, Speculation
from millrace.engine.drafting.find import find_drafter
from millrace.models.adapters.shard import AdapterShard
from millrace.models.load import load_decoder
from millrace.models.spec.families import spec_from_config
from millrace.models.spec.shard import shard_of
from millrace.ops.base.mesh import ONE_RANK, Mesh
from millrace.run.device.device import Device
from millrace.run.make import make_runner
from millrace.run.ranks.recorder import RunnerSetup
from millrace.run.runner import Runner
from millrace.run.settings import KvFormat, RunnerSettings
from millrace.sources.resolve import resolve_model

if TYPE_CHECKING:
    from millrace.run.cuda_runner import CudaRunner


def adapter_shard(setup: RunnerSetup, mesh: Mesh) -> AdapterShard:
    """What this rank has of adapters."""
    return AdapterShard(shard_of(spec_from_config(resolve_model(setup.model).config), mesh.rank, mesh.size))


def runner_from(setup: RunnerSetup, device: Device, mesh: Mesh = ONE_RANK) -> Runner | CudaRunner:
    files, speculate = resolve_model(setup.model), msgspec.convert(setup.speculate, Speculation)
    quantization = msgspec.convert(setup.quantization, Quantization)
    decoder = load_decoder(
        files,
        device=device.torch_device,
        dtype=getattr(torch, setup.dtype),
        deterministic=setup.deterministic,
        quantization=quantization,
        seed=setup.seed,
        mesh=mesh,
    )
    config = Config(
        model=ModelConfig(source=setup.model, seed=setup.seed),
        plan=PlanConfig(speculate=speculate, drafter=setup.drafter),
        run=RunConfig(deterministic=setup.deterministic),
    )
    # Elsewhere the host proposes: drafts come with the records.
    drafter = find_drafter(config, files, decoder.spec, quantization) if device.defaults.pads_drafts else None
    return make_runner(
        decoder,
        device,
        RunnerSettings(
            num_blocks=setup.num_blocks,
            block_size=setup.block_size,
            max_rows=setup.max_rows,
            max_context=setup.max_context,
            token_budget=setup.token_budget,
            kv_dtype=msgspec.convert(setup.kv_dtype, KvFormat),
            speculate=speculate,
            host_slots=setup.host_slots,
            max_copied=setup.max_copied,
            graphs=setup.graphs,
            state_places=setup.state_places,
            state_slots=setup.state_slots,
            adapter_slots=setup.adapter_slots,
            all_states=setup.all_states,
        ),
        drafter=None if drafter is None else drafter.load(decoder),
    )
