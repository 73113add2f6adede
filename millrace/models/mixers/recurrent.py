"""Mixers with a recurrent state: gated delta nets (Qwen3-Next) and Mamba2 (Granite 4).

Both project the hidden states once, convolve what becomes queries, keys and values with the inputs before it, take
them into a matrix per head (`ops/recurrent/recurrence.py`), and norm what that gives, with a gate.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn import functional

from millrace.models.batch import LastTokens, States
from millrace.models.decode_spans import apply_by_span
from millrace.models.mixers.base import MixerBuilder, MixerSite, MixerStep
from millrace.models.spec.layout import RecurrentLayout
from millrace.models.spec.model_spec import MixerKind, RecurrentSpec
from millrace.ops.linear.dense import Linear

L2_EPS = 1e-6
"""Of the norms of queries and keys in delta nets."""

Convolve = Callable[..., Tensor]


@dataclass(frozen=True, slots=True)
class Projected:
    """What the hidden states of T tokens give."""

    mixed: Tensor
    """[T, channels] in the model's dtype: what is convolved."""
    gate: Tensor
    """[T, heads · value_dim]"""
    time: Tensor
    """[T, heads]"""
    beta: Tensor | None
    """[T, heads], before the sigmoid."""


@dataclass(frozen=True, slots=True)
class Taken:
    """What the recurrence takes in, float32, see `ops/recurrent/recurrence.py`."""

    q: Tensor
    k: Tensor
    v: Tensor
    decay: Tensor
    beta: Tensor | None
    added: Tensor | None
    """[T, heads, value_dim]: added to what it gives."""


class RecurrentForm(Protocol):
    """In what families differ."""

    def split(self, x: Tensor) -> Projected: ...
    def take(self, convolved: Tensor, projected: Projected) -> Taken: ...
    def finish(self, out: Tensor, gate: Tensor) -> Tensor:
        """[T, heads, value_dim] and the gate, both float32 -> [T, heads · value_dim], normed."""
        ...


@dataclass(frozen=True, slots=True)
class RecurrentMixer:
    name: MixerKind
    form: RecurrentForm
    inputs: Linear
    conv: Tensor
    """float32 [channels, width]"""
    conv_bias: Tensor | None
    convolve: Convolve
    recur: Convolve
    out: Linear
    state_index: int
    """Its number among the recurrent layers."""

    @property
    def takes_fp8(self) -> bool:
        return self.inputs.takes_fp8

    @property
    def has_decode_kernel(self) -> bool:
        return self.inputs.has_decode_kernel or self.out.has_decode_kernel

    @property
    def shares(self) -> Hashable:
        return self.name

    @property
    def kind(self) -> tuple[object, ...]:
        return (self.name,)

    def prepare(self, step: MixerStep) -> States:
        return states_of(step)

    def mix(self, hidden: Any, step: MixerStep) -> Tensor:
        states: States = step.prepared[self.shares]
        x: Tensor = apply_by_span(self.inputs, hidden, step.spans)
        projected, index = self.form.split(x), self.state_index
        inputs, matrices = states.inputs[index], states.matrices[index]
        convolved = self.convolve(projected.mixed, self.conv, self.conv_bias, inputs, states.rows)
        taken = self.form.take(convolved.float(), projected)
        out = self.recur(taken.q, taken.k, taken.v, taken.decay, taken.beta, matrices, states.rows)
        if taken.added is not None:
            out = out + taken.added
        return self.form.finish(out, projected.gate.float()).to(x.dtype)

    def mix_last(self, hidden: Any, step: MixerStep, last: LastTokens) -> Tensor:
        return self.mix(hidden, step).index_select(0, last.index)

    def write(self, hidden: Any, step: MixerStep) -> None:
        self.mix(hidden, step)


@dataclass(frozen=True, slots=True)
class GatedDelta:
    spec: RecurrentSpec
    rate: Tensor
    """float32 [heads], negative: the logarithm of the decay in one unit of time."""
    time_bias: Tensor
    norm: Tensor
    """float32 [value_dim]"""

    def split(self, x: Tensor) -> Projected:
        """The projection gives what is convolved, gates, betas and times; or for each group a query, a key, and values
        and gates of its heads, and after all groups for each of them betas and times of its heads."""
        own = self.spec
        if not own.by_group:
            mixed, gate, beta, time = torch.split(x, [own.conv_channels, own.value_size, own.heads, own.heads], 1)
            return Projected(mixed, gate, time, beta)
        shared, groups, wide = own.heads // own.groups, own.groups, own.conv_channels + own.value_size
        values = shared * own.value_dim
        parts = x[:, :wide].reshape(-1, groups, wide // groups)
        q, k, v, z = torch.split(parts, [own.key_dim, own.key_dim, values, values], 2)
        beta, time = torch.split(x[:, wide:].reshape(-1, groups, 2 * shared), shared, 2)
        mixed = torch.cat([part.flatten(1) for part in (q, k, v)], 1)
        return Projected(mixed, z.flatten(1), time.flatten(1), beta.flatten(1))

    def take(self, convolved: Tensor, projected: Projected) -> Taken:
        own = self.spec
        q, k, v = torch.split(convolved, [own.key_size, own.key_size, own.value_size], 1)
        q, k = (_unit(part.reshape(-1, own.groups, own.key_dim)) for part in (q, k))
        time = functional.softplus(projected.time.float() + self.time_bias)
        assert projected.beta is not None
        return Taken(
            q=q * own.key_dim**-0.5,
            k=k,
            v=v.reshape(-1, own.heads, own.value_dim).contiguous(),
            decay=(self.rate * time).exp(),
            beta=projected.beta.float().sigmoid(),
            added=None,
        )

    def finish(self, out: Tensor, gate: Tensor) -> Tensor:
        return (_normed(out, self.norm, self.spec.norm_eps)).flatten(1) * functional.silu(gate)


@dataclass(frozen=True, slots=True)
class Mamba2:
    spec: RecurrentSpec
    rate: Tensor
    time_bias: Tensor
    skip: Tensor
    norm: Tensor
    """float32 [heads · value_dim]"""
    means: Callable[[Tensor], list[Tensor]]
    """Over the heads of all ranks."""

    def split(self, x: Tensor) -> Projected:
        own = self.spec
        gate, mixed, time = torch.split(x, [own.value_size, own.conv_channels, own.heads], 1)
        return Projected(mixed, gate, time, None)

    def take(self, convolved: Tensor, projected: Projected) -> Taken:
        own = self.spec
        v, k, q = torch.split(convolved, [own.value_size, own.key_size, own.key_size], 1)
        values = v.reshape(-1, own.heads, own.value_dim)
        time = functional.softplus(projected.time.float() + self.time_bias).clamp(*own.time_step_limit)
        q, k = (part.reshape(-1, own.groups, own.key_dim).contiguous() for part in (q, k))
        return Taken(
            q=q,
            k=k,
            v=values * time[:, :, None],
            decay=(self.rate * time).exp(),
            beta=None,
            added=values * self.skip[:, None],
        )

    def finish(self, out: Tensor, gate: Tensor) -> Tensor:
        gated = out.flatten(1) * functional.silu(gate)
        if self.spec.norm_by_group:
            groups = gated.view(len(gated), self.spec.groups, -1)
            scale = torch.rsqrt(groups.square().mean(-1, keepdim=True) + self.spec.norm_eps)
            return (groups * scale).flatten(1) * self.norm
        return gated * torch.rsqrt(self.means(gated.square())[0] + self.spec.norm_eps) * self.norm


def states_of(step: MixerStep) -> States:
    states = step.batch.states
    if states is None:
        raise AssertionError("the batch of a model with recurrent layers needs their states")
    return states


def _unit(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + L2_EPS)


def _normed(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight


def build_gated_delta(builder: MixerBuilder, site: MixerSite) -> RecurrentMixer:
    spec, layout = _parts(builder, site)
    vectors = [builder.vector(part) for part in (layout.decay, layout.time_bias, layout.gate_norm)]
    return _mixer(builder, site, "gated_delta", GatedDelta(spec, -vectors[0].exp(), *vectors[1:]))


def build_mamba2(builder: MixerBuilder, site: MixerSite) -> RecurrentMixer:
    spec, layout = _parts(builder, site)
    assert layout.skip is not None
    wanted = (layout.decay, layout.time_bias, layout.skip, layout.gate_norm)
    decay, time_bias, skip, norm = (builder.vector(part) for part in wanted)
    return _mixer(builder, site, "mamba2", Mamba2(spec, -decay.exp(), time_bias, skip, norm, builder.means))


def _parts(builder: MixerBuilder, site: MixerSite) -> tuple[RecurrentSpec, RecurrentLayout]:
    assert isinstance(site.layout, RecurrentLayout)
    assert builder.spec.recurrent is not None
    return builder.spec.recurrent, site.layout


def _mixer(builder: MixerBuilder, site: MixerSite, name: MixerKind, form: RecurrentForm) -> RecurrentMixer:
    _, layout = _parts(builder, site)
    return RecurrentMixer(
        name=name,
        form=form,
        inputs=builder.linear(layout.inputs, "recurrent_linear"),
        conv=builder.vector(layout.conv).squeeze(1).contiguous(),
        conv_bias=None if layout.conv_bias is None else builder.vector(layout.conv_bias),
        convolve=builder.choose("causal_conv").make(),
        recur=builder.choose("recurrence").make(),
        out=builder.summed(builder.linear(layout.out, "out_linear")),
        state_index=site.kv_index,
    )
