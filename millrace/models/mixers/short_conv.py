"""A short convolution between two products of the token's own (LFM2). Its state: the inputs before the next."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from millrace.models.batch import LastTokens, States
from millrace.models.decode_spans import apply_by_span
from millrace.models.mixers.base import MixerBuilder, MixerSite, MixerStep
from millrace.models.mixers.recurrent import states_of
from millrace.models.spec.layout import ConvLayout
from millrace.ops.linear.dense import Linear


@dataclass(frozen=True, slots=True)
class ShortConvMixer:
    inputs: Linear
    conv: Tensor
    """float32 [channels, width]"""
    conv_bias: Tensor | None
    convolve: Callable[..., Tensor]
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
        return "short_conv"

    @property
    def kind(self) -> tuple[object, ...]:
        return ("short_conv",)

    def prepare(self, step: MixerStep) -> States:
        return states_of(step)

    def mix(self, hidden: Any, step: MixerStep) -> Tensor:
        states: States = step.prepared[self.shares]
        projected: Tensor = apply_by_span(self.inputs, hidden, step.spans)
        before, after, values = projected.chunk(3, dim=1)
        inputs = states.inputs[self.state_index]
        return after * self.convolve(before * values, self.conv, self.conv_bias, inputs, states.rows)

    def mix_last(self, hidden: Any, step: MixerStep, last: LastTokens) -> Tensor:
        return self.mix(hidden, step).index_select(0, last.index)

    def write(self, hidden: Any, step: MixerStep) -> None:
        self.mix(hidden, step)


def build_short_conv(builder: MixerBuilder, site: MixerSite) -> ShortConvMixer:
    layout = site.layout
    assert isinstance(layout, ConvLayout)
    return ShortConvMixer(
        inputs=builder.linear(layout.inputs, "recurrent_linear"),
        conv=builder.vector(layout.conv).squeeze(1).contiguous(),
        conv_bias=None if layout.conv_bias is None else builder.vector(layout.conv_bias),
        convolve=builder.choose("causal_conv").make(has_silu=False),
        out=builder.summed(builder.linear(layout.out, "out_linear")),
        state_index=site.kv_index,
    )
