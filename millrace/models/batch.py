"""The inputs of one forward pass: the tokens of many rows, one after the other, and where each row's KV is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
from torch import Tensor

from millrace.ops.attention.long_rows import LongRow


@dataclass(slots=True)
class LastTokens:
    """The last token of some rows, when only their hidden states are needed: for other tokens the last layer computes
    only keys and values. For attention these are rows with one query each, so the attention fields of ForwardBatch are
    repeated here with the same meaning."""

    index: Tensor
    """int [n]: indices of the step's tokens, ascending."""
    query_starts: Tensor
    """int32 [n + 1]: 0, 1, 2 ..."""
    seq_lens: Tensor
    block_tables: Tensor
    query_starts_host: list[int]
    seq_lens_host: list[int]
    table_rows: Tensor | None = None
    tiles: Tensor | None = None
    has_decode_rows: bool = True
    long_rows: tuple[LongRow, ...] = ()
    shared_len: Tensor | None = None
    decode_rows: Tensor | None = None
    context_parts: int = 1
    queries_per_row: int = 1
    lengths_of_row: Tensor | None = None

    def of_group(self, group: int) -> LastTokens:
        return replace(self, block_tables=self.block_tables[group])


@dataclass(frozen=True, slots=True)
class DrawnStates:
    """The hidden states to return."""

    index: Tensor
    """int [n]: indices of the step's tokens or, with `last`, of the last tokens."""
    out: Tensor
    """[n, hidden]: written with them."""


@dataclass(slots=True)
class ForwardBatch:
    """T tokens in n ragged rows, in one of two forms.

    Plain: `table_rows` is None, and the `_host` lists and `max_` lengths match the tensors, so that no device tensor is
    read on the host. Paged (GPU graphs): `table_rows` is set, lengths are known only on the device, the `_host` lists
    are empty and the `max_` lengths are 0.
    """

    token_ids: Tensor
    """int64 [T]"""
    positions: Tensor
    """int64 [T]"""
    block_ids: Tensor
    """int64 [groups, T]: the block to which the token's keys and values are written, in each KV group."""
    offsets: Tensor
    """int64 [T]: the token's slot in that block."""
    query_starts: Tensor
    """int32 [n + 1]"""
    seq_lens: Tensor
    """int32 [n]: tokens of the row in the cache after this step has written its own."""
    block_tables: Tensor
    """int32 [groups, n, W]; entries beyond a row's blocks are 0, the scratch block. Paged: the tables of all rows."""
    max_query_len: int
    max_seq_len: int
    query_starts_host: list[int]
    seq_lens_host: list[int]
    table_rows: Tensor | None = None
    """int32 [n]: the row of `block_tables` that each row reads; None if they are in order."""
    tiles: Tensor | None = None
    """Paged: int32 [tiles, 2], (row, first query) of each tile of queries."""
    has_decode_rows: bool = True
    """Paged: True if some rows may have exactly one query."""
    long_rows: tuple[LongRow, ...] = ()
    """Paged: rows that use cuDNN attention instead of tiles."""
    shared_len: Tensor | None = None
    """Paged, decode steps only: int32 [1], length of the prefix shared by all rows."""
    decode_rows: Tensor | None = None
    """Paged: int32 [6, m], the list of decode rows, see `run/packet/decode_rows.py`."""
    context_parts: int = 1
    """Paged, with all queries tiled: split KV, number of parts of each tile's context."""
    queries_per_row: int = 1
    """Paged: queries of a decode row, a token and its drafts."""
    lengths_of_row: Tensor | None = None
    """Paged: int32, sequence lengths by row of `block_tables`; lengths of `decode_rows` are then upper bounds."""
    last: LastTokens | None = None
    """The only tokens whose hidden states are needed; None for all."""
    embedded: Tensor | None = None
    """[T, hidden]: the tokens' embeddings, if already looked up; overwritten."""
    angles: Sequence[Tensor] | None = None
    """Per rope float32 [T, rotary_dim]: the positions' angles, if already looked up."""
    drawn: DrawnStates | None = None
    """The hidden states to return; None for all."""
    decodes: npt.NDArray[np.bool_] | None = None
    """[T], contiguous, CPU only: True for tokens after their request's prompt; None if there are none."""

    def of_group(self, group: int) -> ForwardBatch:
        """The same rows with the block table [n, W] of one group: what attention takes."""
        return replace(self, block_tables=self.block_tables[group])
