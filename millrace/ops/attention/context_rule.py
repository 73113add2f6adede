"""Into how many parts the context of a short prompt chunk is split, so that few tiles of queries still fill the GPU."""

from __future__ import annotations

from millrace.ops.tuning.load import H200_MULTIPROCESSORS

MAX_PARTS = 8
"""Most programs that share the keys of one tile. Two tiles of eight KV heads are then 128 programs; with more parts, of
fewer tiles, each would have less to do than combining them costs."""


def context_parts(num_tiles: int, num_kv_heads: int, num_multiprocessors: int = H200_MULTIPROCESSORS) -> int:
    """As many parts as make one wave of programs, of which one fits a multiprocessor."""
    return max(1, min(MAX_PARTS, num_multiprocessors // (num_tiles * num_kv_heads)))
