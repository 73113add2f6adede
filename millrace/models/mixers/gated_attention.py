"""Attention whose result is multiplied with a gate, the sigmoid of a product of the token's own (Qwen3-Next)."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from millrace.models.batch import LastTokens
from millrace.models.decode_spans import apply_by_span
from millrace.models.mixers.attention import AttentionMixer, build_attention
from millrace.models.mixers.base import MixerBuilder, MixerSite, MixerStep
from millrace.ops.linear.dense import Linear


@dataclass(frozen=True, slots=True)
class GatedAttentionMixer:
    attention: AttentionMixer
    """Its QKV projection gives, for each head, a query and a gate."""
    num_heads: int
    head_dim: int

    @property
    def out(self) -> Linear:
        return self.attention.out

    @property
    def takes_fp8(self) -> bool:
        return self.attention.takes_fp8

    @property
    def has_decode_kernel(self) -> bool:
        return self.attention.has_decode_kernel

    @property
    def shares(self) -> Hashable:
        return self.attention.shares

    @property
    def kind(self) -> tuple[object, ...]:
        return "gated", *self.attention.kind

    @property
    def key_shift(self) -> Tensor | None:
        return self.attention.key_shift

    def prepare(self, step: MixerStep) -> Any:
        return self.attention.prepare(step)

    def mix(self, hidden: Any, step: MixerStep) -> Tensor:
        qkv, gate = self._split(hidden, step)
        return self.attention.attend(qkv, step) * gate

    def mix_last(self, hidden: Any, step: MixerStep, last: LastTokens) -> Tensor:
        qkv, gate = self._split(hidden, step)
        return self.attention.attend_last(qkv, step, last) * gate.index_select(0, last.index)

    def write(self, hidden: Any, step: MixerStep) -> None:
        self.attention.queries(self._split(hidden, step)[0], step)

    def _split(self, hidden: Any, step: MixerStep) -> tuple[Tensor, Tensor]:
        """Queries, keys and values as `PrepareQkv` takes them, and the gates [T, heads · head_dim]."""
        qkv, size = apply_by_span(self.attention.qkv, hidden, step.spans), self.num_heads * self.head_dim
        heads = qkv[:, : 2 * size].unflatten(1, (self.num_heads, 2, self.head_dim))
        gate = torch.sigmoid(heads[:, :, 1].flatten(1))
        return torch.cat([heads[:, :, 0].flatten(1), qkv[:, 2 * size :]], 1), gate


def build_gated_attention(builder: MixerBuilder, site: MixerSite) -> GatedAttentionMixer:
    return GatedAttentionMixer(build_attention(builder, site), builder.spec.num_heads, builder.spec.head_dim)
