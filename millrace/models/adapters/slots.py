"""Slots on the device: the matrices of the adapters that a step's tokens may name, and the addends of a step."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from millrace.models.adapters.read import Adapter
from millrace.models.adapters.targets import NUM_KINDS, AdapterTargets
from millrace.ops.lora.add import AddLora
from millrace.ops.lora.weights import MAX_PARTS, LoraColumns, LoraTable
from millrace.ops.registry import choose

BASE = 0
"""The slot of tokens without an adapter."""


class AdapterSlots:
    """Slots 1 to `num_slots`. Whoever fills one orders that with the steps: no step in flight may read it."""

    def __init__(
        self,
        targets: AdapterTargets,
        num_slots: int,
        device: torch.device,
        dtype: torch.dtype,
        deterministic: bool = False,
    ) -> None:
        self.targets, self.num_slots = targets, num_slots
        self.device, self.dtype = device, dtype
        self.columns = columns = LoraColumns(len(targets.linears), num_slots + 1, device)
        self.tables = tuple(
            None if linear is None else LoraTable(columns, index, linear.out_sizes, linear.in_features)
            for index, linear in enumerate(targets.linears)
        )
        self.op: AddLora = choose("add_lora", device, dtype, deterministic).make()
        none = (0,) * MAX_PARTS
        sizes = [none if table is None else table.out_sizes for table in self.tables]
        self.out_sizes = torch.tensor(sizes, dtype=torch.int64)
        """[linears, MAX_PARTS], on the host."""

    def put(self, slot: int, adapter: Adapter | None) -> None:
        """Fill the slot with matrices that are on the device, or empty it. Takes well under a millisecond."""
        if not 1 <= slot <= self.num_slots:
            raise AssertionError(f"slot {slot} is outside 1 to {self.num_slots}")
        self.columns.put(slot, {} if adapter is None else adapter.linears)

    def step(self, slots: Tensor, *, qkv_alone: bool = False) -> StepAdapters:
        """The addends of a step whose tokens have these slots, int32 [T] on the device. `qkv_alone`: they change no
        other linears."""
        return StepAdapters(slots, self, qkv_alone)


@dataclass(frozen=True, slots=True)
class StepAdapters:
    """Adds to the outputs of linears what the adapters of the step's tokens add."""

    slots: Tensor
    """int32 [T]"""
    home: AdapterSlots
    qkv_alone: bool = False

    def of_layer(self, index: int) -> LayerAdapters:
        return LayerAdapters(self, index)

    def of_tokens(self, index: Tensor) -> StepAdapters:
        """Of some of the step's tokens."""
        return StepAdapters(self.slots.index_select(0, index), self.home, self.qkv_alone)


@dataclass(frozen=True, slots=True)
class LayerAdapters:
    """The addends of one layer's linears, see `targets.py`."""

    step: StepAdapters
    layer: int

    def of_tokens(self, index: Tensor) -> LayerAdapters:
        """Of some of the step's tokens."""
        return LayerAdapters(self.step.of_tokens(index), self.layer)

    def add(self, kind: int, x: Tensor, out: Tensor) -> None:
        """out [T, N] += the addend for x [T, K]."""
        home = self.step.home
        table = home.tables[self.layer * NUM_KINDS + kind]
        if table is None:
            return
        if out.dtype == x.dtype:
            home.op(x, self.step.slots, table, out)
        else:  # Over ranks: float32 until the sum.
            addend = x.new_zeros(out.shape)
            home.op(x, self.step.slots, table, addend)
            out += addend
