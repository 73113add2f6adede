"""Split KV for short prompt chunks: number of parts per context, so that few query tiles still fill the GPU."""

from __future__ import annotations

from millrace.ops.tuning.load import H200_MULTIPROCESSORS

MAX_PARTS = 8
"""Maximum parts per query tile. Two tiles with eight KV heads already give 128 programs; finer parts would cost more to
combine than they save."""


def context_parts(num_tiles: int, num_kv_heads: int, num_multiprocessors: int = H200_MULTIPROCESSORS) -> int:
    """Number of parts that makes one wave of programs, at one program per multiprocessor."""
    return max(1, min(MAX_PARTS, num_multiprocessors // (num_tiles * num_kv_heads)))
