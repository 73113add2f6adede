"""The layers of a decoder op by op, on any device: what a native stack does in one call.

The ops and linears were chosen at load. What each can do beyond its plain form (quantised inputs, adding to the
residual, separate kernels for decode rows) it declares itself, see `ops/linear/dense.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor

from millrace.models.angles import Angles
from millrace.models.batch import ForwardBatch
from millrace.models.decode_spans import Span, apply_by_span, spans_of
from millrace.models.layers import DecoderLayer, Mlp
from millrace.ops.attention import Attention
from millrace.ops.base.unsummed import Unsummed
from millrace.ops.elementwise.norm import add_rms_norm_of
from millrace.ops.kv.cache import format_of
from millrace.ops.linear.dense import Linear


@dataclass(frozen=True, slots=True)
class DecoderOps:
    """The stateless ops, chosen once for this device and dtype.

    With `quantise=True` norms and `gated` return their result as `Quantised`.
    """

    rms_norm: Callable[..., Any]
    """(x, weight, eps, quantise=False) -> normed"""
    add_rms_norm: Callable[..., tuple[Any, Tensor]]
    """(x, residual, weight, eps, quantise=False) -> (normed, x + residual)"""
    gated: Callable[..., Any]
    """(gate_up, quantise=False) -> act(gate) · up"""
    route: Callable[[Tensor, int, bool], tuple[Tensor, Tensor]]
    attention: Attention


@dataclass(frozen=True, slots=True)
class Branch:
    """A branch of the residual: a linear or an MLP, and the norm of its output if the family has one."""

    module: Linear | Mlp
    norm: Tensor | None
    spans: tuple[Span, ...]


class OpProgram:
    def __init__(
        self,
        layers: tuple[DecoderLayer, ...],
        final_norm: Tensor,
        ops: DecoderOps,
        angles: Angles,
        eps: float,
        use_decode_kernels: bool,
    ) -> None:
        self.layers, self.ops = layers, ops
        self._final_norm, self._angles, self._eps = final_norm, angles, eps
        parts = (part for layer in layers for part in (layer.qkv, layer.out, layer.mlp))
        self._splits_decode = use_decode_kernels and any(part.has_decode_kernel for part in parts)

    def __call__(self, residual: Tensor, batch: ForwardBatch, kv: Sequence[Tensor]) -> Tensor:
        """Decoder.forward for embedded tokens, which may be overwritten."""
        layers, ops, last = self.layers, self.ops, batch.last
        rows = self._angles.of(batch.positions) if batch.angles is None else batch.angles
        block_size, cache_format = kv[0].shape[3], format_of(kv[0])
        prepared = {
            (group, window): ops.attention.prepare(batch.rows.of_group(group), block_size, window, cache_format)
            for group, window in dict.fromkeys((layer.kv_group, layer.window) for layer in layers)
        }
        last_rows = None
        if last is not None and len(last.index):
            own, window = last.rows.of_group(layers[-1].kv_group), layers[-1].window
            last_rows = ops.attention.prepare(own, block_size, window, cache_format)
        decodes = batch.decodes if self._splits_decode else None
        spans = spans_of(decodes)

        hidden = ops.rms_norm(residual, layers[0].input_norm, self._eps, quantise=layers[0].qkv.takes_fp8)
        for index, layer in enumerate(layers):
            if batch.taps is not None:
                for tap in np.flatnonzero(batch.taps.layers == index).tolist():
                    batch.taps.out[:, tap] = residual
            qkv = apply_by_span(layer.qkv, hidden, spans)
            angles = None if layer.rope is None else rows[layer.rope]
            own_kv, block_ids = kv[layer.kv_index], batch.block_ids[layer.kv_group]
            queries = layer.prepare_qkv(qkv, angles, own_kv, block_ids, batch.offsets)
            prepared_rows = prepared[layer.kv_group, layer.window]
            if last is not None and index + 1 == len(layers):
                if not len(last.index):
                    return residual[:0]
                queries, residual = queries.index_select(0, last.index), residual.index_select(0, last.index)
                spans = spans_of(None if decodes is None else decodes[last.index.numpy()])
                prepared_rows = last_rows
            out, mlp = Branch(layer.out, layer.attention_out_norm, spans), Branch(layer.mlp, layer.mlp_out_norm, spans)
            hidden = ops.attention(queries, own_kv, prepared_rows)
            hidden, residual = self._add(out, hidden, residual, layer.mlp_norm, layer.mlp.takes_fp8)
            if index + 1 < len(layers):
                following = layers[index + 1]
                hidden, residual = self._add(mlp, hidden, residual, following.input_norm, following.qkv.takes_fp8)
        return self._final(self._result(mlp, hidden), residual, batch)

    def _result(self, branch: Branch, x: Any) -> Any:
        result = apply_by_span(branch.module, x, branch.spans)
        return result if branch.norm is None else self.ops.rms_norm(result, branch.norm, self._eps)

    def _add(self, branch: Branch, x: Any, residual: Tensor, norm: Tensor, quantise: bool) -> tuple[Any, Tensor]:
        """Add the branch's output for x to the residual, which may be overwritten: (norm of the sum, sum)."""
        ops, module = self.ops, branch.module
        if branch.norm is None and module.adds(residual.shape[0]):
            module.add_to(x, residual)
            return ops.rms_norm(residual, norm, self._eps, quantise=quantise), residual
        return ops.add_rms_norm(self._result(branch, x), residual, norm, self._eps, quantise=quantise)

    def _final(self, hidden: Tensor | Unsummed, residual: Tensor, batch: ForwardBatch) -> Tensor:
        norm, eps, drawn = self._final_norm, self._eps, batch.drawn
        if drawn is not None:
            return add_rms_norm_of(self.ops.add_rms_norm, hidden, residual, norm, eps, drawn.index, drawn.out)
        final: Tensor = self.ops.add_rms_norm(hidden, residual, norm, eps)[0]
        return final
