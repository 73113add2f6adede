"""What a GPU runner keeps on the device between steps: KV pools, request table, columns of sampler and drafters."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from millrace.models.adapters.slots import AdapterSlots
from millrace.models.decoder import Decoder
from millrace.run.device.adapter_slots import OrderedFiller, StreamFiller, make_slots
from millrace.run.device.block_copier import BlockCopier, JointCopier, OrderedCopier, StreamCopier
from millrace.run.device.device import Device
from millrace.run.device.host_gate import HostGates, open_gates
from millrace.run.device.state_pool import StatePool, make_state_pool
from millrace.run.drafting.device_chain import ChainSetup, DeviceDrafter, paged
from millrace.run.drafting.device_drafts import DeviceDrafts
from millrace.run.drafting.make_device import make_device_drafter
from millrace.run.drafting.models import DrafterModel, allocate_pools
from millrace.run.packet.packet_ring import RING
from millrace.run.sampling.device_sampler import DeviceSampler
from millrace.run.settings import RunnerSettings
from millrace.run.table.request_table import RequestTable


@dataclass(frozen=True, slots=True)
class DeviceState:
    kv: list[Tensor]
    draft_kv: list[Tensor]
    """The drafter's part of every block; empty if it has none."""
    table: RequestTable
    sampler: DeviceSampler
    drafts: DeviceDrafts | None
    """None if no step has drafts."""
    chain: DeviceDrafter | None
    """The drafter that is a model, if there is one."""
    states: StatePool | None
    """None if the model has no recurrent layer."""
    slots: AdapterSlots | None
    """None if steps have no adapters."""
    gates: HostGates | None
    """What draws wait behind; None if the device cannot wait for the host."""


def make_device_state(
    decoder: Decoder, device: Device, settings: RunnerSettings, drafter: DrafterModel | None
) -> DeviceState:
    spec, max_rows = decoder.spec, settings.max_rows
    kv, draft_kv = allocate_pools(decoder, device.torch_device, settings, drafter)
    # A padding row reads as many block-table columns as its tokens need.
    max_blocks = max(settings.context_blocks, -(-settings.max_tokens // settings.block_size))
    num_groups = spec.kv_groups.num_groups
    table = RequestTable(device, max_rows=max_rows + 1, max_blocks=max_blocks, num_groups=num_groups)
    sampler = DeviceSampler(device, table, max_rows=max_rows, vocab_size=spec.vocab_size)
    drafts: DeviceDrafts | None = None
    chain: DeviceDrafter | None = None
    if settings.speculate != "off":
        drafts = DeviceDrafts(
            device,
            max_rows=max_rows + 1,
            max_context=settings.max_context,
            vocab_size=spec.vocab_size,
            speculate=settings.speculate,
            holds_drafts=drafter is not None,
        )
    if drafter is not None and drafts is not None:
        setup = ChainSetup(
            table,
            sampler,
            drafts.columns,
            max_rows=max_rows,
            block_size=settings.block_size,
            queries_per_tile=paged(decoder.attention).queries_per_tile,
            vocab_size=spec.vocab_size,
        )
        chain = make_device_drafter(setup, drafter, draft_kv, decoder.dtype)
    states = make_state_pool(decoder, device, settings)
    slots = make_slots(decoder, settings, deterministic=paged(decoder.attention).tile_decode_rows)
    gates = open_gates(RING) if device.torch_device.type == "cuda" else None
    return DeviceState(kv, draft_kv, table, sampler, drafts, chain, states, slots, gates)


def make_copier(state: DeviceState, device: Device, settings: RunnerSettings) -> BlockCopier | None:
    """None without KV blocks in host memory."""
    pools, slots = [kv for kv in (state.kv, state.draft_kv) if kv], settings.host_slots
    if not slots:
        return None
    if device.torch_device.type == "cuda":
        return JointCopier([StreamCopier(kv, slots, device, max_blocks=settings.max_copied) for kv in pools])
    return JointCopier([OrderedCopier(kv, slots, device) for kv in pools])


def make_filler(state: DeviceState, device: Device) -> OrderedFiller | StreamFiller | None:
    """None without slots for adapters."""
    if state.slots is None:
        return None
    return StreamFiller(state.slots) if device.torch_device.type == "cuda" else OrderedFiller(state.slots, device)
