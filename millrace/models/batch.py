"""The inputs of one forward pass: the tokens of many rows, one after the other, and where each row's KV is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from torch import Tensor

from millrace.models.adapters.slots import StepAdapters
from millrace.ops.attention import AttentionRows
from millrace.ops.base.state_rows import StateRows


@dataclass(frozen=True, slots=True)
class LastTokens:
    """The last tokens of some rows, when only their hidden states are needed: for other tokens the last layer computes
    only keys and values."""

    index: Tensor
    """int [n]: indices of the step's tokens, ascending."""
    rows: AttentionRows
    """The rows of these tokens, with no other queries."""


@dataclass(frozen=True, slots=True)
class DrawnStates:
    """The hidden states to return."""

    index: Tensor
    """int [n]: indices of the step's tokens or, with `last`, of the last tokens."""
    out: Tensor
    """[n, hidden]: written with them."""


@dataclass(frozen=True, slots=True)
class Taps:
    """States inside the model that a drafter reads: the residual after some numbers of layers, below all of them."""

    layers: npt.NDArray[np.int64]
    """Contiguous."""
    out: Tensor
    """[T, taps, hidden], contiguous: written with them."""


@dataclass(frozen=True, slots=True)
class States:
    """The recurrent states of the table's rows, one tensor of each kind per recurrent layer, and which of them the
    batch's rows have. A forward pass reads and writes them."""

    rows: StateRows
    inputs: Sequence[Tensor]
    """[table rows, places, channels, width - 1]: what the convolution reads of earlier tokens."""
    matrices: Sequence[Tensor]
    """float32 [table rows, places, heads, keys, values]"""


@dataclass(slots=True)
class ForwardBatch:
    """T tokens in n ragged rows."""

    token_ids: Tensor
    """int64 [T]"""
    positions: Tensor
    """int64 [T]"""
    block_ids: Tensor
    """int64 [groups, T]: the block to which the token's keys and values are written, in each KV group."""
    offsets: Tensor
    """int64 [T]: the token's slot in that block."""
    rows: AttentionRows
    last: LastTokens | None = None
    """The only tokens whose hidden states are needed; None for all."""
    drawn: DrawnStates | None = None
    """The hidden states to return; None for all."""
    embedded: Tensor | None = None
    """[T, hidden]: the tokens' embeddings, if already looked up; overwritten."""
    angles: Sequence[Tensor] | None = None
    """Per rope float32 [T, rotary_dim]: the positions' angles, if already looked up."""
    taps: Taps | None = None
    """States to write beside the result; None for none."""
    adapters: StepAdapters | None = None
    """What adapters add; None if no token of the batch has one."""
    states: States | None = None
    """None if the model has no recurrent layer."""
    decodes: npt.NDArray[np.bool_] | None = None
    """[T], contiguous, CPU only: True for tokens after their request's prompt; None if there are none."""
