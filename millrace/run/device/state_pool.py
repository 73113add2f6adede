"""The recurrent states of a model's rows, and the slots for checkpoints of them.

A state is not cut into blocks: each row of the table has its own, at as many places as a step may draw tokens for it
(`ops/base/state_rows.py`). All layers are in one tensor of each kind, so a copy takes one operation.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from millrace.models.batch import States
from millrace.models.decoder import Decoder
from millrace.models.spec.model_spec import ModelSpec
from millrace.ops.base.state_rows import StateRows
from millrace.plan.step import Int32s, StateCopies
from millrace.run.device.device import Device
from millrace.run.device.kv_pool import untouched_zeros
from millrace.run.settings import RunnerSettings


class StatePool:
    def __init__(
        self, spec: ModelSpec, device: Device, dtype: torch.dtype, *, num_rows: int, num_places: int, num_slots: int
    ) -> None:
        own = spec.recurrent
        assert own is not None
        self._device = device
        self.num_places = num_places
        rows, slots = (spec.num_recurrent, num_rows, num_places), (spec.num_recurrent, num_slots)
        inputs, matrix = (own.conv_channels, own.conv_width - 1), (own.heads, own.key_dim, own.value_dim)
        place = device.torch_device
        self._live = (_zeros((*rows, *inputs), dtype, place), _zeros((*rows, *matrix), torch.float32, place))
        self._kept = (_zeros((*slots, *inputs), dtype, place), _zeros((*slots, *matrix), torch.float32, place))
        self._layers = tuple(list(live) for live in self._live)

    def of(self, rows: StateRows) -> States:
        inputs, matrices = self._layers
        return States(rows, inputs, matrices)

    def of_step(self, query_starts: Tensor, starts: Int32s, rows: Int32s) -> States:
        starts_on, rows_on = self._device.upload(np.stack([starts, rows]).astype(np.int32))
        return self.of(StateRows(query_starts, starts_on, rows_on))

    def load(self, copies: StateCopies | None) -> None:
        """Before a step's tokens: rows begin with the state of a slot."""
        if copies is not None and copies.num_loads:
            rows, slots, places = self._columns(copies, slice(copies.num_loads))
            for live, kept in zip(self._live, self._kept, strict=True):
                live[:, rows, places] = kept[:, slots]

    def save(self, copies: StateCopies | None) -> None:
        """After them: slots take the state of a row."""
        if copies is not None and copies.num_loads < len(copies.rows):
            rows, slots, places = self._columns(copies, slice(copies.num_loads, None))
            for live, kept in zip(self._live, self._kept, strict=True):
                kept[:, slots] = live[:, rows, places]

    def _columns(self, copies: StateCopies, part: slice) -> Tensor:
        places = copies.positions % np.int32(self.num_places)
        columns = np.stack([column[part] for column in (copies.rows, copies.slots, places)])
        return self._device.upload(columns.astype(np.int32)).long()


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    if device.type == "cpu" and 0 not in shape:
        return untouched_zeros(shape, dtype)
    return torch.zeros(shape, dtype=dtype, device=device)


def make_state_pool(decoder: Decoder, device: Device, settings: RunnerSettings) -> StatePool | None:
    """None if the model has no recurrent layer. The last row is of padding."""
    if decoder.spec.recurrent is None:
        return None
    return StatePool(
        decoder.spec,
        device,
        decoder.dtype,
        num_rows=settings.max_rows + 1,
        num_places=settings.state_places,
        num_slots=settings.state_slots,
    )
