"""The interface of attention: ragged rows of queries over a paged cache.

The queries of row i are the step's tokens query_starts[i] : query_starts[i + 1], which are the last of its seq_lens[i]
tokens. When attention runs, the cache already holds the keys and values of all these tokens.
"""

from __future__ import annotations

from typing import Any, Protocol

from torch import Tensor


class Rows(Protocol):
    query_starts: Tensor
    """int32 [n + 1]"""
    seq_lens: Tensor
    """int32 [n]"""
    block_tables: Tensor
    """int32 [n, W]; 0 after a row's last block."""
    query_starts_host: list[int]
    seq_lens_host: list[int]


class Attention(Protocol):
    """Causal attention. A query at position p sees keys k <= p, and with a window only those with p - k < window."""

    def prepare(self, rows: Rows, block_size: int, window: int | None) -> Any:
        """Compute once per step what all layers with this window share."""
        ...

    def __call__(self, queries: Tensor, kv: Tensor, prepared: Any) -> Tensor:
        """queries [T, heads, head_dim], kv: one layer of the cache (ops/kv/cache.py) -> [T, heads · head_dim]

        On a GPU, queries are a view of the QKV projection: prefill reads this step's keys and values from the same
        buffer."""
        ...
