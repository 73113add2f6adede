"""What attention must know about a step: ragged rows of queries over a paged cache.

Row i has queries query_starts[i] : query_starts[i + 1] of the step's tokens. They are the last of its seq_lens[i]
tokens, whose keys and values are all in the cache when attention runs.
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
    """int32 [n, W]; entries beyond a row's own blocks are 0."""
    query_starts_host: list[int]
    seq_lens_host: list[int]


class Attention(Protocol):
    """Causal attention. A query at position p sees keys k <= p, and with a window only those with p - k < window."""

    def prepare(self, rows: Rows, block_size: int, window: int | None) -> Any:
        """What all layers with this window share in one step."""
        ...

    def __call__(self, queries: Tensor, kv: Tensor, prepared: Any) -> Tensor:
        """queries [T, heads, head_dim], kv a layer of the cache (see ops/kv/cache.py) -> [T, heads · head_dim]

        On a GPU, queries are a view of the fused projection: a prompt's own keys and values are read beside them."""
        ...
