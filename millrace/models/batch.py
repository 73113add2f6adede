"""The inputs of one forward pass: tokens of many rows, one after the other, and where each row's KV lives."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from torch import Tensor

from millrace.ops.attention.long_rows import LongRow


@dataclass(slots=True)
class LastTokens:
    """The last token of some of a step's rows, where only their hidden states are wanted. In the last layer nothing but
    keys and values is then computed for any other token. As rows of attention they have one query each."""

    index: Tensor
    """int [n]: which of the step's tokens, in rising order."""
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


@dataclass(frozen=True, slots=True)
class DrawnStates:
    """The hidden states that are wanted in the end."""

    index: Tensor
    """int [n]: which of the step's tokens or, with `last`, of those."""
    out: Tensor
    """[n, hidden]: where they go."""


@dataclass(slots=True)
class ForwardBatch:
    """T tokens in n ragged rows. The `_host` lists state the same facts as their tensors, so that no path ever has to
    read a device tensor on the host."""

    token_ids: Tensor
    """int64 [T]"""
    positions: Tensor
    """int64 [T]"""
    slots: Tensor
    """int64 [T]: block_id * block_size + offset, where the token's keys and values go."""
    query_starts: Tensor
    """int32 [n + 1]"""
    seq_lens: Tensor
    """int32 [n]: tokens of the row in the cache once this step has written its own."""
    block_tables: Tensor
    """int32 [n, W]; entries beyond a row's blocks are 0, the scratch block that no row owns."""
    max_query_len: int
    max_seq_len: int
    query_starts_host: list[int]
    seq_lens_host: list[int]
    table_rows: Tensor | None = None
    """int32 [n]: which row of `block_tables` each row reads; None where they are in order."""
    tiles: Tensor | None = None
    """With table_rows: the queries of longer rows cut into tiles, as PagedAttention reads them."""
    has_decode_rows: bool = True
    """With table_rows: whether some rows may have exactly one query."""
    long_rows: tuple[LongRow, ...] = ()
    """With table_rows: rows without tiles that go through the library's attention."""
    shared_len: Tensor | None = None
    """With table_rows and single queries: int32 [1], tokens at the beginning that all rows have in the same blocks."""
    decode_rows: Tensor | None = None
    """With table_rows: int32 [6, m], the rows with one query as a list, the longest first; see `run.single_queries`."""
    context_parts: int = 1
    """With tiles of all queries: how many programs share the keys of each."""
    last: LastTokens | None = None
    """The only tokens whose hidden states are wanted; None for all."""
    places: tuple[Tensor, Tensor] | None = None
    """int64 [T] each: block ids and offsets of `slots`, where these are known already."""
    embedded: Tensor | None = None
    """[T, hidden]: the tokens' embeddings, where they were looked up with the other inputs; overwritten."""
    angles: Sequence[Tensor] | None = None
    """float32 [T, rotary_dim] of each rope: the positions' angles, likewise."""
    drawn: DrawnStates | None = None
    """What of the hidden states is wanted; None for all."""
    decodes: npt.NDArray[np.bool_] | None = None
    """[T], contiguous, on a CPU: whether the token comes after its request's prompt; None where none does."""
