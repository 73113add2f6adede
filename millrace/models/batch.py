"""The inputs of one forward pass: tokens of many rows, one after the other, and where each row's KV lives."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


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
