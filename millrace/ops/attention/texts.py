"""Attention within texts that are packed one after another: each token sees its whole text, or a window of it in both
directions.

make() -> function (qkv [tokens, 3, heads, head], spans, window) -> [tokens, heads, head]. `window`: how far a token
sees; 0: everywhere.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor

from millrace.ops.base.version import Shape, Version
from millrace.ops.cpp.native import avx512_missing, native

LANES = 16
"""Of the kernels' vectors."""


@dataclass(frozen=True, slots=True)
class TextSpans:
    """Where texts stand, in host memory."""

    starts: Tensor
    """int64 [texts + 1]: index of the first token of each, and the number of tokens."""
    seen: Tensor
    """int64 [texts]: tokens at the beginning of each that are attended to; at least 1."""


def attend_texts(qkv: Tensor, spans: TextSpans, window: int) -> Tensor:
    """The reference: one text after the other, in float32."""
    out = torch.empty_like(qkv[:, 0])
    for (first, last), seen in zip(pairwise(spans.starts.tolist()), spans.seen.tolist(), strict=True):
        query, key, value = qkv[first:last].float().permute(1, 2, 0, 3).unbind(0)
        at = torch.arange(last - first, device=qkv.device)
        near = (at[:, None] - at[None, :seen]).abs() <= window if window else None
        found = F.scaled_dot_product_attention(query[None], key[None, :, :seen], value[None, :, :seen], attn_mask=near)
        out[first:last] = found[0].transpose(0, 1).to(out.dtype)
    return out


class NativeTextAttention:
    """C++: a task is a head of some queries of a text; keys are laid out once for all of them."""

    def __init__(self) -> None:
        self._attend = native().without_gil.text_attention

    def __call__(self, qkv: Tensor, spans: TextSpans, window: int) -> Tensor:
        qkv = qkv.contiguous()
        tokens, _, heads, head = qkv.shape
        out = torch.empty((tokens, heads, head))
        addresses = (part.data_ptr() for part in (qkv, out, spans.starts, spans.seen))
        self._attend(*addresses, len(spans.seen), heads, head, window, head**-0.5)
        return out


def _fits(shape: Shape) -> bool:
    return bool(shape["head_dim"] % LANES == 0)


VERSIONS = (
    Version(
        op="text_attention",
        name="native",
        make=NativeTextAttention,
        when="C++: packed texts as they are, sums in registers",
        devices=("cpu",),
        dtypes=(torch.float32,),
        invariant_on=("cpu",),
        fits=_fits,
        missing=avx512_missing,
    ),
    Version(
        op="text_attention",
        name="reference",
        make=lambda: attend_texts,
        when="the reference: one text after the other",
        invariant_on=("cpu",),
    ),
)
