"""The layers of a decoder op by op, on any device: what a native stack does in one call.

The ops and linears were chosen at load. What each can do beyond its plain form (quantised inputs, adding to the
residual, separate kernels for decode rows) it declares itself, see `ops/linear/dense.py`. How a layer mixes tokens is
its mixer's business (`models/mixers`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor

from millrace.models.adapters.slots import LayerAdapters
from millrace.models.adapters.targets import OUT
from millrace.models.angles import Angles
from millrace.models.batch import ForwardBatch, LastTokens, Taps
from millrace.models.decode_spans import Span, apply_by_span, spans_of
from millrace.models.layers import DecoderLayer, Mlp, adapted_linear
from millrace.models.mixers import Mixer, MixerStep
from millrace.ops.attention import Attention
from millrace.ops.base.unsummed import Unsummed
from millrace.ops.elementwise.norm import add_rms_norm_of
from millrace.ops.linear.dense import Linear


@dataclass(frozen=True, slots=True)
class DecoderOps:
    """The stateless ops, chosen once for this device and dtype.

    With `quantise=True` norms and `activation` return their result as `Quantised`.
    """

    norm: Callable[..., Any]
    """(x, weight, eps, quantise=False) -> normed"""
    add_norm: Callable[..., tuple[Any, Tensor]]
    """(x, residual, weight, eps, quantise=False) -> (normed, x + residual)"""
    activation: Callable[..., Any]
    """(gate_up, quantise=False) -> act(gate) · up; in MLPs without gates (up, quantise=False) -> act(up)"""
    route: Callable[[Tensor, int, bool], tuple[Tensor, Tensor]]
    attention: Attention


@dataclass(frozen=True, slots=True)
class Branch:
    """A branch of the residual: a linear or an MLP, and the norm of its output if the family has one."""

    module: Linear | Mlp
    norm: Tensor | None
    spans: tuple[Span, ...]
    adapters: LayerAdapters | None = None

    def __call__(self, x: Any) -> Any:
        module, adapters = self.module, self.adapters
        if adapters is None:
            return apply_by_span(module, x, self.spans)
        if not isinstance(module, Linear):
            return module.adapted(x, self.spans, adapters)
        return adapted_linear(module, x, self.spans, adapters, OUT)


class OpProgram:
    def __init__(
        self,
        layers: tuple[DecoderLayer, ...],
        final_norm: Tensor,
        ops: DecoderOps,
        angles: Angles,
        eps: float,
        use_decode_kernels: bool,
        is_parallel: bool = False,
    ) -> None:
        """With `is_parallel` MLPs read the residual that mixers read."""
        self.layers, self.ops = layers, ops
        self._final_norm, self._angles, self._eps = final_norm, angles, eps
        self._is_parallel = is_parallel
        parts = (part for layer in layers for part in (layer.mixer, layer.mlp) if part is not None)
        self._splits_decode = use_decode_kernels and any(part.has_decode_kernel for part in parts)

    def __call__(self, residual: Tensor, batch: ForwardBatch, kv: Sequence[Tensor]) -> Tensor:
        """Decoder.forward for embedded tokens, which may be overwritten."""
        layers, last, spans, adapters = self.layers, batch.last, self._spans(batch), batch.adapters
        is_adapted = adapters is not None
        adapts_all = adapters is not None and not adapters.qkv_alone
        step = MixerStep(batch, kv, self.ops.attention, self._angles_of(batch), spans)
        step.prepare([layer.mixer for layer in layers])
        hidden, first = residual, layers[0]
        if first.input_norm is not None:
            takes_fp8 = self._takes_fp8(first.mixer, is_adapted)
            hidden = self.ops.norm(residual, first.input_norm, self._eps, quantise=takes_fp8)
        for index, layer in enumerate(layers):
            _tap(batch.taps, index, residual)
            step.adapters = None if adapters is None else adapters.of_layer(index)
            addends = step.adapters if adapts_all else None
            beside = self._beside(layer, hidden, residual) if self._is_parallel else None
            if last is None or index + 1 < len(layers):
                hidden = layer.mixer.mix(hidden, step)
            elif len(last.index):
                hidden = layer.mixer.mix_last(hidden, step, last)
                residual, spans = residual.index_select(0, last.index), self._spans(batch, last)
                addends = None if addends is None else addends.of_tokens(last.index)
                beside = None if beside is None else beside.index_select(0, last.index)
            else:
                layer.mixer.write(hidden, step)
                return residual[:0]
            out = Branch(layer.mixer.out, layer.mixer_out_norm, spans, addends)
            after = out if layer.mlp is None else Branch(layer.mlp, layer.mlp_out_norm, spans, addends)
            if beside is not None:
                residual, after = residual + self._result(after, beside), out
            elif layer.mlp is not None:
                takes_fp8 = self._takes_fp8(layer.mlp, adapts_all)
                hidden, residual = self._add(out, hidden, residual, layer.mlp_norm, takes_fp8)
            if index + 1 < len(layers):
                following = layers[index + 1]
                takes_fp8 = self._takes_fp8(following.mixer, is_adapted)
                hidden, residual = self._add(after, hidden, residual, following.input_norm, takes_fp8)
        return self._final(self._result(after, hidden), residual, batch)

    def _beside(self, layer: DecoderLayer, hidden: Tensor, residual: Tensor) -> Tensor:
        """What a parallel MLP reads. Without a norm of its own, what the mixer reads."""
        normed: Tensor = hidden if layer.mlp_norm is None else self.ops.norm(residual, layer.mlp_norm, self._eps)
        return normed

    def _takes_fp8(self, part: Mixer | Mlp, is_adapted: bool) -> bool:
        """What adapters add is computed from inputs that are not quantised, and so is what two branches read."""
        return part.takes_fp8 and not is_adapted and not self._is_parallel

    def _angles_of(self, batch: ForwardBatch) -> Sequence[Tensor]:
        return self._angles.of(batch.positions) if batch.angles is None else batch.angles

    def _spans(self, batch: ForwardBatch, last: LastTokens | None = None) -> tuple[Span, ...]:
        decodes = batch.decodes if self._splits_decode else None
        return spans_of(decodes if decodes is None or last is None else decodes[last.index.numpy()])

    def _result(self, branch: Branch, x: Any) -> Any:
        result = branch(x)
        return result if branch.norm is None else self.ops.norm(result, branch.norm, self._eps)

    def _add(self, branch: Branch, x: Any, residual: Tensor, norm: Tensor | None, quantise: bool) -> tuple[Any, Tensor]:
        """Add the branch's output for x to the residual, which may be overwritten: (norm of the sum, sum). Without a
        norm the next branch reads the sum itself."""
        ops, module = self.ops, branch.module
        if norm is None:
            total = residual + self._result(branch, x)
            return total, total
        if branch.norm is None and branch.adapters is None and module.adds(residual.shape[0]):
            module.add_to(x, residual)
            return ops.norm(residual, norm, self._eps, quantise=quantise), residual
        return ops.add_norm(self._result(branch, x), residual, norm, self._eps, quantise=quantise)

    def _final(self, hidden: Tensor | Unsummed, residual: Tensor, batch: ForwardBatch) -> Tensor:
        norm, eps, drawn = self._final_norm, self._eps, batch.drawn
        if drawn is not None:
            return add_rms_norm_of(self.ops.add_norm, hidden, residual, norm, eps, drawn.index, drawn.out)
        final: Tensor = self.ops.add_norm(hidden, residual, norm, eps)[0]
        return final


def _tap(taps: Taps | None, index: int, residual: Tensor) -> None:
    """Copy the residual before this layer to the drafters that read it."""
    if taps is not None:
        for tap in np.flatnonzero(taps.layers == index).tolist():
            taps.out[:, tap] = residual
