"""Attention with keys and values in the cache, over all earlier tokens or a window of them."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from millrace.models.adapters.targets import QKV
from millrace.models.batch import LastTokens
from millrace.models.decode_spans import apply_by_span
from millrace.models.mixers.base import MixerBuilder, MixerSite, MixerStep
from millrace.models.spec.layout import AttentionLayout
from millrace.models.spec.rope import inverse_frequencies
from millrace.ops.attention import AttentionRows
from millrace.ops.attention.qkv import PrepareQkv
from millrace.ops.elementwise.norm import rms_norm
from millrace.ops.elementwise.rope import rope, rope_angles
from millrace.ops.kv.cache import format_of
from millrace.ops.linear.dense import Linear

SHIFT_POSITIONS, SHIFT_SAMPLES = 32768, 2048
"""Key shifts are means over as many positions as the model knows, but not over more than these; of so many samples."""


@dataclass(frozen=True, slots=True)
class ProjectionNorms:
    q_norm: Tensor
    k_norm: Tensor
    rms_norm: Callable[..., Tensor]
    eps: float

    def __call__(self, qkv: Tensor) -> Tensor:
        queries, keys = len(self.q_norm), len(self.k_norm)
        q, k, v = torch.split(qkv, [queries, keys, qkv.shape[1] - queries - keys], dim=1)
        normed = (self.rms_norm(x.contiguous(), weight, self.eps) for x, weight in ((q, self.q_norm), (k, self.k_norm)))
        return torch.cat([*normed, v], dim=1)


@dataclass(frozen=True, slots=True)
class RotatedNorms:
    """Norms of single heads that follow the rotation."""

    q_norm: Tensor
    k_norm: Tensor
    heads: tuple[int, int]
    """Of queries and of keys."""
    eps: float

    def __call__(self, qkv: Tensor, angles: Tensor | None) -> Tensor:
        every = qkv.view(len(qkv), -1, len(self.q_norm)).float()
        q, k, v = torch.split(every, [*self.heads, every.shape[1] - sum(self.heads)], dim=1)
        if angles is not None:
            q, k = rope(q, angles), rope(k, angles)
        normed = (rms_norm(x, weight, self.eps) for x, weight in ((q, self.q_norm), (k, self.k_norm)))
        return torch.cat([*normed, v], dim=1).flatten(1).to(qkv.dtype)


@dataclass(frozen=True, slots=True)
class SplitProjectionNorms:
    """The same over the heads of all ranks."""

    q_norm: Tensor
    k_norm: Tensor
    means: Callable[..., list[Tensor]]
    counts_keys: bool
    eps: float

    def __call__(self, qkv: Tensor) -> Tensor:
        queries, keys = len(self.q_norm), len(self.k_norm)
        q, k, v = torch.split(qkv, [queries, keys, qkv.shape[1] - queries - keys], dim=1)
        wide = (q.float(), k.float())
        counted = wide[1] if self.counts_keys else wide[1][:, :0]
        means = self.means(wide[0].square(), counted.square())
        scales = (torch.rsqrt(mean + self.eps) for mean in means)
        weights = (self.q_norm, self.k_norm)
        normed = (x * scale * weight for x, scale, weight in zip(wide, scales, weights, strict=True))
        return torch.cat([*(part.to(qkv.dtype) for part in normed), v], dim=1)


@dataclass(frozen=True, slots=True)
class AttentionMixer:
    qkv: Linear
    prepare_qkv: PrepareQkv
    out: Linear
    rope: int | None
    window: int | None
    kv_group: int
    kv_index: int
    """The KV tensor of the pool that holds this layer's keys and values, in the blocks of its group."""
    projection_norms: ProjectionNorms | SplitProjectionNorms | None = None
    """Norms that take all heads together; `prepare_qkv` has those of single heads."""
    key_shift: Tensor | None = None
    """float32 [kv_heads, head_dim]: what `prepare_qkv` subtracts from keys before it rounds them to four bits."""
    order: Tensor | None = None
    """int64: the order of the projection's outputs in which rotated dimensions are paired as the ops pair them. Scores
    do not change, since queries and keys have the same."""
    rotated_norms: RotatedNorms | None = None
    """They take the rotation from `prepare_qkv`."""
    clip: float | None = None
    """What queries, keys and values are limited to."""
    sinks: Tensor | None = None
    """float32 [heads]: a score of each head that takes its share of the softmax; see `Attention`."""

    @property
    def takes_fp8(self) -> bool:
        return self.qkv.takes_fp8

    @property
    def has_decode_kernel(self) -> bool:
        return self.qkv.has_decode_kernel or self.out.has_decode_kernel

    @property
    def shares(self) -> Hashable:
        return "attention", self.kv_group, self.window

    @property
    def kind(self) -> tuple[object, ...]:
        return "attention", self.rope is None, self.window, self.sinks is None

    def prepare(self, step: MixerStep) -> Any:
        return self._prepare(step, step.batch.rows)

    def mix(self, hidden: Any, step: MixerStep) -> Tensor:
        return self.attend(self._qkv(hidden, step), step)

    def mix_last(self, hidden: Any, step: MixerStep, last: LastTokens) -> Tensor:
        return self.attend_last(self._qkv(hidden, step), step, last)

    def write(self, hidden: Any, step: MixerStep) -> None:
        self.queries(self._qkv(hidden, step), step)

    def attend(self, qkv: Tensor, step: MixerStep) -> Tensor:
        queries = self.queries(qkv, step)
        return step.attention(queries, step.kv[self.kv_index], step.prepared[self.shares], self.sinks)

    def attend_last(self, qkv: Tensor, step: MixerStep, last: LastTokens) -> Tensor:
        # First, since another kernel must run between this and attention (`Attention.prepare`).
        prepared = self._prepare(step, last.rows)
        queries = self.queries(qkv, step).index_select(0, last.index)
        return step.attention(queries, step.kv[self.kv_index], prepared, self.sinks)

    def _prepare(self, step: MixerStep, rows: AttentionRows) -> Any:
        own = step.kv[self.kv_index]
        return step.attention.prepare(rows.of_group(self.kv_group), own.shape[3], self.window, format_of(own))

    def _qkv(self, hidden: Any, step: MixerStep) -> Tensor:
        qkv: Tensor = apply_by_span(self.qkv, hidden, step.spans)
        if step.adapters is not None:
            step.adapters.add(QKV, hidden, qkv)
        if self.projection_norms is not None:
            qkv = self.projection_norms(qkv)
        if self.clip is not None:
            qkv = qkv.clamp(-self.clip, self.clip)
        return qkv if self.order is None else qkv.index_select(1, self.order)

    def queries(self, qkv: Tensor, step: MixerStep) -> Tensor:
        """The queries, after keys and values have been written."""
        batch, rope = step.batch, self.rope
        angles = None if rope is None else step.angles[rope]
        if self.rotated_norms is not None:
            qkv, angles = self.rotated_norms(qkv, angles), None
        return self.prepare_qkv(qkv, angles, step.kv[self.kv_index], batch.block_ids[self.kv_group], batch.offsets)


def build_attention(builder: MixerBuilder, site: MixerSite) -> AttentionMixer:
    spec, layout = builder.spec, site.layout
    assert isinstance(layout, AttentionLayout)
    prepare = builder.choose("qkv", head_dim=spec.head_dim)
    q_norm, k_norm = builder.optional_norm(layout.q_norm), builder.optional_norm(layout.k_norm)
    whole: ProjectionNorms | SplitProjectionNorms | None = None
    if spec.qk_norm_span == "projection" and q_norm is not None and k_norm is not None:
        if builder.mesh.size > 1:
            whole = SplitProjectionNorms(q_norm, k_norm, builder.means, builder.counts_keys, spec.norm_eps)
        else:
            whole = ProjectionNorms(q_norm, k_norm, builder.choose("rms_norm").make(), spec.norm_eps)
        q_norm = k_norm = None
    rotated = None
    if spec.qk_norm_after_rope and q_norm is not None and k_norm is not None:
        rotated = RotatedNorms(q_norm, k_norm, (spec.num_heads, spec.num_kv_heads), spec.norm_eps)
        q_norm = k_norm = None
    order = _order(builder, site) if spec.rotates_neighbours or spec.qkv_by_group else None
    key_shift = _key_shift(builder, site, layout, order)
    return AttentionMixer(
        qkv=builder.linear(layout.qkv, "qkv_linear"),
        prepare_qkv=prepare.make(
            spec.num_heads,
            spec.num_kv_heads,
            spec.head_dim,
            spec.norm_eps,
            q_norm,
            k_norm,
            key_shift,
        ),
        out=builder.summed(builder.linear(layout.out, "out_linear")),
        rope=site.layer.rope,
        window=site.layer.window,
        kv_group=site.kv_group,
        kv_index=site.kv_index,
        projection_norms=whole,
        key_shift=key_shift,
        order=order,
        rotated_norms=rotated,
        clip=spec.qkv_clip,
        sinks=None if layout.sinks is None else builder.vector(layout.sinks),
    )


def _key_shift(builder: MixerBuilder, site: MixerSite, layout: AttentionLayout, order: Tensor | None) -> Tensor | None:
    """The mean over positions of the rotated biases of keys; None without biases, or where a norm follows them. It is
    the large part of keys that four bits would round to: pairs of dimensions with large biases hardly turn."""
    spec = builder.spec
    if not layout.qkv.biases or layout.k_norm is not None:
        return None
    keys = slice(spec.q_size, spec.q_size + spec.kv_size)
    whole = torch.cat([builder.vector(bias, report=False) for bias in layout.qkv.biases])
    shift = (whole if order is None else whole[order])[keys].view(1, spec.num_kv_heads, spec.head_dim)
    if site.layer.rope is not None:
        own = spec.ropes[site.layer.rope]
        positions = torch.linspace(0, min(spec.max_context, SHIFT_POSITIONS) - 1, SHIFT_SAMPLES)
        angles = rope_angles(positions, inverse_frequencies(own), own.attention_factor).mean(0, keepdim=True)
        shift = rope(shift, angles.to(builder.device))
    return shift[0].contiguous()


def _order(builder: MixerBuilder, site: MixerSite) -> Tensor:
    """All queries, all keys, all values; of rotated pairs that are neighbours the first of each, then the second
    ones, in each head of queries and of keys."""
    spec = builder.spec
    if spec.rotates_neighbours and spec.qk_norm and spec.qk_norm_span == "head":
        raise ValueError("norms of heads are not reordered with the dimensions of the heads")
    every = torch.arange(spec.q_size + 2 * spec.kv_size).view(-1, spec.head_dim)
    if spec.qkv_by_group:
        groups = every.view(spec.num_kv_heads, -1, spec.head_dim)
        queries, keys, values = torch.split(groups, [groups.shape[1] - 2, 1, 1], dim=1)
        every = torch.cat([part.flatten(0, 1) for part in (queries, keys, values)])
    if spec.rotates_neighbours and site.layer.rope is not None:
        size = spec.ropes[site.layer.rope].rotary_dim
        own = every[: spec.num_heads + spec.num_kv_heads]
        own[:, :size] = torch.cat((own[:, 0:size:2], own[:, 1:size:2]), dim=1)
    return every.flatten().to(builder.device)
