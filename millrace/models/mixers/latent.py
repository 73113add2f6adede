"""Latent attention (DeepSeek V2 and V3): the cache holds one vector per token, from which all heads compute their keys
and values.

Keys are linear in that latent, so a head's queries are multiplied with the transposed matrix instead, and what
attention sums are latents, which become the head's values afterwards. No key or value is ever made.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from millrace.models.batch import LastTokens
from millrace.models.decode_spans import apply_by_span
from millrace.models.mixers.base import MixerBuilder, MixerSite, MixerStep
from millrace.models.spec.layout import LatentLayout
from millrace.models.spec.model_spec import LatentSpec
from millrace.ops.attention import AttentionRows
from millrace.ops.attention.latent_qkv import LatentQkv
from millrace.ops.base.quantised import with_quantise
from millrace.ops.kv.cache import format_of
from millrace.ops.linear.dense import Linear
from millrace.ops.linear.per_head import PerHead


@dataclass(frozen=True, slots=True)
class Queries:
    """What queries are computed from, [T, query_rank], with their norm and matrix."""

    norm: Tensor
    up: Linear


@dataclass(frozen=True, slots=True)
class LatentMixer:
    sizes: LatentSpec
    num_heads: int
    rms_norm: Callable[..., Any]
    inputs: Linear
    queries: Queries | None
    parts: LatentQkv
    to_latents: PerHead
    """[T, heads, key_dim] -> [T, heads, rank]: queries."""
    to_values: PerHead
    """[T, heads, rank] -> [T, heads, value_dim]: sums of latents."""
    out: Linear
    rope: int
    kv_group: int
    kv_index: int

    @property
    def takes_fp8(self) -> bool:
        return self.inputs.takes_fp8

    @property
    def has_decode_kernel(self) -> bool:
        linears = (self.inputs, self.out) if self.queries is None else (self.inputs, self.queries.up, self.out)
        return any(linear.has_decode_kernel for linear in linears)

    @property
    def shares(self) -> Hashable:
        return "latent", self.kv_group

    @property
    def kind(self) -> tuple[object, ...]:
        return ("latent",)

    def prepare(self, step: MixerStep) -> Any:
        return self._prepare(step, step.batch.rows)

    def mix(self, hidden: Any, step: MixerStep) -> Tensor:
        projected = self._write(hidden, step)
        return self._attend(self._queries(projected, step), step.angles[self.rope], step, step.prepared[self.shares])

    def mix_last(self, hidden: Any, step: MixerStep, last: LastTokens) -> Tensor:
        # First, since another kernel must run between this and attention (`Attention.prepare`).
        prepared = self._prepare(step, last.rows)
        queries = self._queries(self._write(hidden, step), step).index_select(0, last.index)
        return self._attend(queries, step.angles[self.rope].index_select(0, last.index), step, prepared)

    def write(self, hidden: Any, step: MixerStep) -> None:
        self._write(hidden, step)

    def _prepare(self, step: MixerStep, rows: AttentionRows) -> Any:
        own = step.kv[self.kv_index]
        return step.attention.prepare(rows.of_group(self.kv_group), own.shape[3], None, format_of(own))

    def _write(self, hidden: Any, step: MixerStep) -> Tensor:
        """Write what the cache holds of the tokens; what their queries are computed from [T, n]."""
        projected: Tensor = apply_by_span(self.inputs, hidden, step.spans)
        first, batch = projected.shape[1] - self.sizes.width, step.batch
        place = (step.kv[self.kv_index], batch.block_ids[self.kv_group], batch.offsets)
        self.parts.write(projected[:, first:], step.angles[self.rope], *place)
        return projected[:, :first]

    def _queries(self, projected: Tensor, step: MixerStep) -> Tensor:
        """[T, heads, key_dim + rope_dim], before rotation."""
        if self.queries is not None:
            up, norm = self.queries.up, self.queries.norm
            normed = self.rms_norm(projected.contiguous(), norm, self.sizes.norm_eps, quantise=up.takes_fp8)
            projected = apply_by_span(up, normed, step.spans)
        return projected.reshape(projected.shape[0], self.num_heads, -1)

    def _attend(self, queries: Tensor, angles: Tensor, step: MixerStep, prepared: Any) -> Tensor:
        plain, rotated = torch.split(queries, [self.sizes.key_dim, self.sizes.rope_dim], dim=2)
        absorbed = self.parts.join(self.to_latents(plain), rotated, angles)
        summed = step.attention(absorbed, step.kv[self.kv_index], prepared)
        return self.to_values(summed.view(summed.shape[0], self.num_heads, -1)).flatten(1)


def build_latent_attention(builder: MixerBuilder, site: MixerSite) -> LatentMixer:
    spec, layout, sizes = builder.spec, site.layout, builder.spec.latent
    assert isinstance(layout, LatentLayout)
    assert sizes is not None
    assert site.layer.rope is not None
    queries = None
    if layout.query_up is not None and layout.query_norm is not None:
        queries = Queries(builder.norm(layout.query_norm), builder.linear(layout.query_up, "query_up_linear"))
    heads = builder.matrix(layout.up).view(spec.num_heads, -1, sizes.rank)
    keys, values = torch.split(heads, [sizes.key_dim, sizes.value_dim], dim=1)
    per_head = builder.choose("per_head_linear")

    def make(weight: Tensor) -> PerHead:
        _, rows, columns = weight.shape
        linear = builder.choose("linear", "head_linear", in_features=columns, out_features=rows)
        made: PerHead = per_head.make(weight, linear.make)
        return made

    rms_norm = with_quantise(builder.choose("rms_norm").make())
    parts = builder.choose("latent_qkv").make(
        *(sizes.rank, sizes.rope_dim, sizes.pairs_neighbours, sizes.norm_eps),
        norm=builder.norm(layout.latent_norm),
        rms_norm=rms_norm,
    )
    return LatentMixer(
        sizes=sizes,
        num_heads=spec.num_heads,
        rms_norm=rms_norm,
        inputs=builder.linear(layout.inputs, "latent_linear"),
        queries=queries,
        parts=parts,
        to_latents=make(keys.mT),
        to_values=make(values),
        out=builder.summed(builder.linear(layout.out, "out_linear")),
        rope=site.layer.rope,
        kv_group=site.kv_group,
        kv_index=site.kv_index,
    )
