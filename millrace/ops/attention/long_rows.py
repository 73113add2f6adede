"""Long prompt chunks through cuDNN's attention, which is 1.5 times as fast as a Triton kernel on Hopper.

cuDNN needs contiguous keys and values and cannot shift its causal mask. A chunk's own keys and values are still in the
buffer of the fused projection; the context before it is gathered from its blocks and attended in a second, unmasked
call, and the two results are combined. cuDNN builds a plan for every pair of lengths, so it only gets whole chunks
(`run/cuda_runner.py`), of which there are few.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from millrace.ops.triton.attention.prefill import AttentionShape, PagedRows

CUDNN_MIN_QUERIES = 4096
"""Chunks of at least this many queries are worth the copy and the second call (measured on an H200)."""


@dataclass(frozen=True, slots=True)
class LongRow:
    row: int
    first_token: int
    num_queries: int
    context: int
    """Tokens of the row before this step."""


def can_take_long_rows(device: torch.device, dtype: torch.dtype, head_dim: int, softcap: float | None) -> bool:
    """True if cuDNN can compute this model's attention."""
    if device.type != "cuda" or dtype not in (torch.bfloat16, torch.float16) or softcap is not None:
        return False
    return head_dim % 8 == 0 and head_dim <= 128 and torch.backends.cudnn.is_available()  # type: ignore[no-untyped-call]


def attend_long_row(
    queries: Tensor, kv: Tensor, rows: PagedRows, row: LongRow, shape: AttentionShape, sinks: Tensor | None = None
) -> Tensor:
    """Attention of one long row: [queries, heads · head_dim]. `queries` is a view of the fused projection, which also
    holds this step's values and its keys after RoPE."""
    from millrace.ops.triton.attention.long_rows import contiguous_kv, join

    tokens = slice(row.first_token, row.first_token + row.num_queries)
    mine = queries[tokens].transpose(0, 1)
    keys, values = (part[tokens].transpose(0, 1) for part in _own_keys_values(queries, shape))
    own, own_lse = _cudnn(mine, keys, values, shape.scale, causal=True)
    if not row.context:
        return _rescaled(own.transpose(0, 1), own_lse, sinks).reshape(row.num_queries, -1)
    before_keys, before_values = contiguous_kv(kv, rows, row.row, row.context, shape, queries.dtype)
    before, before_lse = _cudnn(mine, before_keys, before_values, shape.scale, causal=False)
    out = torch.empty((row.num_queries, shape.num_heads * shape.head_dim), dtype=queries.dtype, device=queries.device)
    join(own, own_lse, before, before_lse, out)
    if sinks is None:
        return out
    by_head = out.view(row.num_queries, shape.num_heads, -1)
    return _rescaled(by_head, torch.logaddexp(own_lse, before_lse), sinks).reshape(row.num_queries, -1)


def _rescaled(attended: Tensor, lse: Tensor, sinks: Tensor | None) -> Tensor:
    """[queries, heads, head_dim] less the share of the softmax that sinks take; log-sum-exps [heads, queries]."""
    if sinks is None:
        return attended
    share = torch.sigmoid(lse.float() - sinks[:, None])
    return (attended.float() * share.t()[:, :, None]).to(attended.dtype)


def _own_keys_values(queries: Tensor, shape: AttentionShape) -> tuple[Tensor, Tensor]:
    """[T, kv_heads, head_dim] each; they lie after the query heads of the same tokens."""
    size = (queries.shape[0], shape.num_kv_heads, shape.head_dim)
    first = queries.storage_offset() + shape.num_heads * shape.head_dim
    keys = queries.as_strided(size, queries.stride(), first)
    return keys, queries.as_strided(size, queries.stride(), first + shape.num_kv_heads * shape.head_dim)


def _cudnn(queries: Tensor, keys: Tensor, values: Tensor, scale: float, *, causal: bool) -> tuple[Tensor, Tensor]:
    """([heads, n, head_dim], log-sum-exps [heads, n] as natural logarithms)"""
    result: Any = torch.ops.aten._scaled_dot_product_cudnn_attention(
        queries[None], keys[None], values[None], None, True, 0.0, causal, False, scale=scale
    )
    return result[0][0], result[1].view(queries.shape[0], queries.shape[1])
