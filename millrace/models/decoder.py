"""The one decoder. Families differ in their spec, devices in the ops that are chosen for them."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from millrace.models.angles import Angles
from millrace.models.batch import ForwardBatch
from millrace.models.decode_spans import Span, any_decode_kernels, apply_by_span, spans_of
from millrace.models.layers import DecoderLayer, DecoderWeights, DenseMlp
from millrace.models.native_stack import NativeStack, native_stack_missing
from millrace.models.spec.model_spec import ModelSpec
from millrace.ops.attention import Attention
from millrace.ops.base.greedy_head import DrawnTokens, GreedyHead
from millrace.ops.base.unsummed import Unsummed
from millrace.ops.base.version import Choice
from millrace.ops.elementwise.norm import add_rms_norm_of
from millrace.ops.elementwise.softcap import softcap
from millrace.ops.head.embedding import PlainEmbedding
from millrace.ops.linear.dense import NativeParts, ResidualAdder


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

    module: Any
    norm: Tensor | None
    spans: tuple[Span, ...]


class Decoder:
    """A loaded model. It keeps no state between steps; the KV tensors are passed in."""

    def __init__(
        self,
        spec: ModelSpec,
        weights: DecoderWeights,
        ops: DecoderOps,
        device: torch.device,
        dtype: torch.dtype,
        choices: dict[str, Choice],
        use_decode_kernels: bool = False,
    ) -> None:
        """With `use_decode_kernels`, decode rows use separate kernels where an op has them: faster, but a token's
        result then depends on whether it belongs to the prompt."""
        self.spec = spec
        self.device = device
        self.dtype = dtype
        self.num_bytes = weights.num_bytes
        """Bytes of all weights, tied ones counted once, without the padding of packed layouts (under 32 rows per
        matrix)."""
        self.choices = choices
        """The version chosen for each op, and why."""
        self._weights = weights
        self._ops = ops
        self._use_decode_kernels = use_decode_kernels
        self._splits_decode = use_decode_kernels and any_decode_kernels(_linears(weights))
        # Rounded to the model's dtype, as the families that scale embeddings were trained.
        self.embedding_scale = float(torch.tensor(spec.embedding_scale, dtype=dtype))
        self.angles = Angles(spec.ropes, weights.frequencies)
        self.native_stack = self._make_stack()
        """All layers in one C++ call; None if the model needs something it does not support."""

    @property
    def attention(self) -> Attention:
        return self._ops.attention

    @property
    def embedding_matrix(self) -> Tensor | None:
        """[vocab, hidden] if the embedding is a plain matrix, else None."""
        embedding = self._weights.embedding
        return embedding.weight if isinstance(embedding, PlainEmbedding) else None

    def with_distinct_layers(self) -> Decoder:
        """A copy with one layer of each kind and the last layer, for warm-up: its forward pass launches the same
        kernels, most of them once."""
        layers = self._weights.layers
        kinds = {_kind_of(layer): layer for layer in layers[:-1]}
        short = copy.copy(self)
        short._weights = replace(self._weights, layers=(*kinds.values(), layers[-1]))
        return short

    def _make_stack(self) -> NativeStack | None:
        if native_stack_missing(self.spec, self.choices):
            return None
        tied = self.choices.get("tied_embedding")
        has_head = tied is not None and tied.version.name == "native"
        return NativeStack(
            self.spec, self._weights, self.angles, self.dtype, self.embedding_scale, has_head, self._use_decode_kernels
        )

    @torch.inference_mode()
    def forward(self, batch: ForwardBatch, kv: Sequence[Tensor], nanoseconds: Tensor | None = None) -> Tensor:
        """Write the tokens' keys and values into `kv`, the KV tensors of the pool, and return the hidden states after
        the final norm: [T, hidden], or [n, hidden] of the batch's `last` tokens or `drawn` states.

        A native stack adds the time of each of native_stack.KINDS to `nanoseconds`."""
        if self.native_stack is None:
            return self.run_layers(batch, kv)
        hidden = self.native_stack(self._embed(batch), batch, kv, nanoseconds)
        drawn = batch.drawn
        return hidden if drawn is None else drawn.out.copy_(hidden.index_select(0, drawn.index))

    @torch.inference_mode()
    def run_layers(self, batch: ForwardBatch, kv: Sequence[Tensor]) -> Tensor:
        """The forward pass op by op. A native stack must give the same result, bit for bit."""
        weights, ops, eps = self._weights, self._ops, self.spec.norm_eps
        layers, last = weights.layers, batch.last
        block_size = kv[0].shape[3]
        rows = self.angles.of(batch.positions) if batch.angles is None else batch.angles
        prepared = {
            (group, window): ops.attention.prepare(batch.of_group(group), block_size, window)
            for group, window in dict.fromkeys((layer.kv_group, layer.window) for layer in layers)
        }
        last_rows = None
        if last is not None and len(last.index):
            last_rows = ops.attention.prepare(last.of_group(layers[-1].kv_group), block_size, layers[-1].window)
        decodes = batch.decodes if self._splits_decode else None
        spans = spans_of(decodes)

        residual = self._embed(batch)
        hidden = ops.rms_norm(residual, layers[0].input_norm, eps, quantise=layers[0].qkv.takes_fp8)
        for index, layer in enumerate(layers):
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
        return result if branch.norm is None else self._ops.rms_norm(result, branch.norm, self.spec.norm_eps)

    def _add(self, branch: Branch, x: Any, residual: Tensor, norm: Tensor, quantise: bool) -> tuple[Any, Tensor]:
        """Add the branch's output for x to the residual, which may be overwritten: (norm of the sum, sum)."""
        ops, eps, module = self._ops, self.spec.norm_eps, branch.module
        if branch.norm is None and isinstance(module, ResidualAdder) and module.adds(residual.shape[0]):
            module.add_to(x, residual)
            return ops.rms_norm(residual, norm, eps, quantise=quantise), residual
        return ops.add_rms_norm(self._result(branch, x), residual, norm, eps, quantise=quantise)

    def _final(self, hidden: Tensor | Unsummed, residual: Tensor, batch: ForwardBatch) -> Tensor:
        norm, eps, drawn = self._weights.final_norm, self.spec.norm_eps, batch.drawn
        if drawn is not None:
            return add_rms_norm_of(self._ops.add_rms_norm, hidden, residual, norm, eps, drawn.index, drawn.out)
        final: Tensor = self._ops.add_rms_norm(hidden, residual, norm, eps)[0]
        return final

    @torch.inference_mode()
    def logits(self, hidden: Tensor, out: Tensor | None = None, draws: bool = False) -> Tensor:
        """Logits, float32 [n, vocab], of hidden states [n, hidden], soft-capped if the family does so. With `draws`,
        tokens will be drawn from them, and the head treats every row as a decode row.

        Logits are not rounded to the model's dtype: in bfloat16 the top logits are often equal, and the first such
        token would be drawn instead of the best. `out` may be written and returned."""
        head = self._weights.head
        if draws and self._use_decode_kernels and isinstance(head, NativeParts):
            logits = head.wide(hidden, decode=True)
        else:
            logits = head.wide(hidden, out)
        cap = self.spec.logit_softcap
        return logits if cap is None else softcap(logits, cap)

    def draws(self, rows: int) -> bool:
        """True if `draw` is faster for this many rows than drawing from their logits."""
        head = self._weights.head
        return isinstance(head, GreedyHead) and self.spec.logit_softcap is None and head.draws(rows)

    @torch.inference_mode()
    def draw(self, hidden: Tensor, to: DrawnTokens) -> None:
        """Draw the most likely token for each hidden state [n, hidden]. Only if `draws` returns True."""
        head = self._weights.head
        assert isinstance(head, GreedyHead)
        head.draw(hidden, self.spec.vocab_size, to)

    def _embed(self, batch: ForwardBatch) -> Tensor:
        if batch.embedded is not None:
            return batch.embedded
        rows = self._weights.embedding(batch.token_ids)
        return rows if self.embedding_scale == 1.0 else rows * self.embedding_scale


def _kind_of(layer: DecoderLayer) -> tuple[object, ...]:
    """Everything that decides which kernels a layer launches."""
    norms = (layer.attention_out_norm is None, layer.mlp_out_norm is None)
    return type(layer.mlp), layer.rope is None, layer.window, *norms


def _linears(weights: DecoderWeights) -> Iterator[Any]:
    for layer in weights.layers:
        yield from (layer.qkv, layer.out)
        if isinstance(layer.mlp, DenseMlp):
            yield from (layer.mlp.gate_up, layer.mlp.down)
