"""Binds the tensors of a model's files to the ops chosen for a device, or for one rank of several."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from millrace.config import Quantization
from millrace.models.decoder import Decoder
from millrace.models.kept_weights import grouped_matrices
from millrace.models.layers import DecoderLayer, DecoderWeights, DenseMlp, Mlp, MoeMlp, PlainMlp, SharedMlp
from millrace.models.mixers import MIXERS, MixerSite
from millrace.models.op_program import DecoderOps
from millrace.models.spec.layout import (
    LayerLayout,
    Matrix,
    ModelLayout,
    MoeLayout,
    NormLayout,
    TensorSpec,
)
from millrace.models.spec.model_spec import LayerSpec, ModelSpec, MoeSpec
from millrace.models.spec.rope import inverse_frequencies
from millrace.models.spec.shard import Shard
from millrace.models.stored import KeptMatrices
from millrace.models.weight_sizes import layout_bytes
from millrace.ops.attention import Attention
from millrace.ops.base.mesh import ONE_RANK, Mesh
from millrace.ops.base.quantised import with_quantise
from millrace.ops.base.routing import PLAIN_ROUTING
from millrace.ops.base.unsummed import Unsummed
from millrace.ops.base.version import Choice
from millrace.ops.head.split_vocabulary import SplitEmbedding, SplitHead
from millrace.ops.linear.dense import Head, Linear
from millrace.ops.linear.gated import GatedLinear
from millrace.ops.linear.grouped import has_blocks
from millrace.ops.linear.stored import StoredLinear, StoredWeight
from millrace.ops.linear.summed import SummedLinear
from millrace.ops.moe.experts import Experts, ExpertWeights
from millrace.ops.moe.router import Route
from millrace.ops.registry import choose

if TYPE_CHECKING:
    from millrace.models.weights import WeightSource


RoutedExperts = Callable[[Tensor, Tensor], Tensor | Unsummed]
Progress = Callable[[int, int], None]
"""Called with (done_bytes, total_bytes)."""


class DecoderBuilder:
    """Binds the tensors of a source to the ops chosen for a device and dtype."""

    mesh: Mesh = ONE_RANK
    counts_keys = True
    """False if another rank has the same KV heads and counts them in means over all ranks."""

    def __init__(
        self,
        spec: ModelSpec,
        layout: ModelLayout,
        source: WeightSource,
        stored: KeptMatrices | None,
        device: torch.device,
        dtype: torch.dtype,
        deterministic: bool,
        quantization: Quantization,
        progress: Progress | None,
    ) -> None:
        self.spec, self.layout, self.source, self.stored = spec, layout, source, stored
        self.device, self.dtype, self.deterministic = device, dtype, deterministic
        self._layer_linear = "fp8_linear" if quantization == "fp8" else "linear"
        self._int8 = quantization == "int8"
        self.choices: dict[str, Choice] = {}
        self._progress = progress
        self._done_bytes = 0
        self._total_bytes = layout_bytes(spec, layout, dtype, quantization)
        self.grouped = grouped_matrices(source, layout, device, dtype, stored, quantization)
        for kept in (stored, self.grouped):
            self._total_bytes -= 0 if kept is None else kept.saved_bytes()

    @torch.inference_mode()
    def build(self) -> Decoder:
        spec = self.spec
        ops = self.ops()
        embedding, head = self.embedding_and_head()
        layers = tuple(
            self.layer(ops, place, layer, layout)
            for place, layer, layout in zip(spec.kv_groups.places, spec.layers, self.layout.layers, strict=True)
        )
        frequencies = tuple(inverse_frequencies(rope).to(self.device) for rope in spec.ropes)
        self._report(sum(table.nbytes for table in frequencies))
        weights = DecoderWeights(
            embedding=embedding,
            layers=layers,
            final_norm=self.hidden_norm(self.layout.final_norm) * spec.hidden_scale,
            head=head,
            frequencies=frequencies,
            num_bytes=self._total_bytes,
        )
        use_decode_kernels = not self.deterministic
        assert not spec.one_norm or spec.parallel_mlp
        return Decoder(spec, weights, ops, self.device, self.dtype, self.choices, use_decode_kernels, self.mesh)

    def choose(self, op: str, key: str = "", **shape: Any) -> Choice:
        choice = choose(op, self.device, self.dtype, self.deterministic, **shape)
        self.choices[key or op] = choice
        return choice

    def ops(self) -> DecoderOps:
        spec = self.spec
        norms = [self.choose(op) for op in ("rms_norm", "add_rms_norm")]
        self._norms_sum = all(choice.version.name == "triton" for choice in norms) and spec.norm_kind == "rms"
        if spec.norm_kind == "layer":
            norms = [self.choose(op) for op in ("layer_norm", "add_layer_norm")]
        activation = self.choose("gated") if spec.gated_mlp else self.choose("activation", kind=spec.activation)
        return DecoderOps(
            norm=with_quantise(norms[0].make()),
            add_norm=with_quantise(norms[1].make()),
            activation=with_quantise(activation.make(spec.activation)),
            route=self.choose("router").make(),
            attention=self._attention(),
        )

    def _attention(self) -> Attention:
        spec, own = self.spec, self.spec.latent
        if own is not None:
            choice = self.choose("latent_attention", rank=own.rank, rope_dim=own.rope_dim)
            latent: Attention = choice.make(spec.num_heads, own.rank, own.rope_dim, spec.attention_scale)
            return latent
        choice = self.choose("attention", head_dim=spec.head_dim)
        attention: Attention = choice.make(
            spec.num_heads, spec.num_kv_heads, spec.head_dim, spec.attention_scale, spec.attention_softcap
        )
        return attention

    def embedding_and_head(self) -> tuple[Any, Head]:
        part = self.layout.embedding
        rows, columns = part.shape
        shape: dict[str, Any] = {"in_features": columns, "out_features": rows, "stored": self._is_stored((part,))}
        shape["kept"] = self._is_grouped((part,))
        if self.layout.head is not None:
            embedding = self.choose("embedding", **shape).make(self._weight((part,)))
            head: Any = self.linear(self.layout.head, "head", "linear")
            return embedding, head
        tied = self.choose("tied_embedding", **shape).make(self._weight((part,)))
        return tied.rows, tied.head

    def layer(self, ops: DecoderOps, place: tuple[int, int], spec: LayerSpec, layout: LayerLayout) -> DecoderLayer:
        kv_group, kv_index = place
        return DecoderLayer(
            input_norm=self.optional_hidden_norm(layout.input_norm),
            mixer=MIXERS[spec.mixer](self, MixerSite(spec, layout.mixer, kv_group, kv_index)),
            mixer_out_norm=self.optional_hidden_norm(layout.mixer_out_norm),
            mlp_norm=self.optional_hidden_norm(layout.mlp_norm),
            mlp=None if layout.mlp is None else self._mlp(ops, layout.mlp),
            mlp_out_norm=self.optional_hidden_norm(layout.mlp_out_norm),
        )

    def summed(self, linear: Linear) -> Linear:
        """A linear whose result is added to the residual: over all ranks of a mesh."""
        return linear

    def summed_experts(self, routed: RoutedExperts) -> RoutedExperts:
        return routed

    def means(self, *parts: Tensor) -> list[Tensor]:
        """Of each part [T, own] of all ranks, the mean over the last dimension, float32 [T, 1]."""
        return [part.mean(-1, keepdim=True) for part in parts]

    def _mlp(self, ops: DecoderOps, layout: tuple[Matrix, Matrix] | MoeLayout) -> Mlp:
        if isinstance(layout, MoeLayout):
            return self._moe(ops, layout)
        gate_up, down = layout
        if not self.spec.gated_mlp:
            up = self.linear(gate_up, "up_linear")
            return PlainMlp(up, ops.activation, self.summed(self.linear(down, "down_linear")))
        return DenseMlp(self._gated_linear(ops, gate_up), self.summed(self.linear(down, "down_linear")))

    def _moe(self, ops: DecoderOps, layout: MoeLayout) -> Mlp:
        moe, hidden_size = self.spec.moe, self.spec.hidden_size
        assert moe is not None
        sizes: dict[str, Any] = {"in_features": hidden_size, "out_features": moe.inner_size, "int8": self._int8}
        plain = self.choose("linear", "expert_linear", **sizes)
        grouped = [self.choose("grouped_linear", "expert_linear", **sizes, has_blocks=flag) for flag in (False, True)]
        self._linear_choice(layout.experts[0][0], "expert_linear", "linear")

        def linear(weight: Any, bias: Tensor | None) -> Any:
            if isinstance(weight, StoredWeight):
                return StoredLinear(weight, bias)
            return (plain if isinstance(weight, Tensor) else grouped[has_blocks(weight)]).make(weight, bias)

        weights = ExpertWeights(moe.num_experts, self._experts(layout), self._expert_biases(layout))
        is_stored = self.device.type != "cpu" and self._is_grouped(layout.experts[0][0].parts)
        choice = self.choose(
            "experts",
            in_features=hidden_size,
            inner_features=moe.inner_size,
            stored=is_stored,
            biased=moe.has_bias or moe.clamp is not None,
        )
        experts: Experts = choice.make(weights, moe.clamp or self.spec.activation, linear)
        router = self.linear(layout.router, "router_linear", "linear")
        mlp = MoeMlp(router, self.summed_experts(self._routed(ops, moe, experts, layout)))
        return mlp if layout.shared is None else self._with_shared(ops, mlp, layout.shared, layout.shared_gate)

    def _routed(self, ops: DecoderOps, moe: MoeSpec, experts: Experts, layout: MoeLayout) -> RoutedExperts:
        if moe.routing != PLAIN_ROUTING:
            bias = None if layout.router_bias is None else self.vector(layout.router_bias)
            route: Route = self.choose("limited_router").make(moe.routing, bias)
            return lambda x, logits: experts(x, *route(logits, moe.top_k, moe.renormalise))
        is_last = layout.shared is None and not self.spec.parallel_mlp
        unsummed = self._norms_sum and is_last and self.mesh.size == 1

        def routed(x: Tensor, logits: Tensor) -> Tensor | Unsummed:
            return experts.routed(x, logits, moe.top_k, moe.renormalise, route=ops.route, unsummed=unsummed)

        return routed

    def _with_shared(self, ops: DecoderOps, mlp: MoeMlp, shared: tuple[Matrix, Matrix], gate: Matrix | None) -> Mlp:
        gate_up, down = shared
        own = DenseMlp(self._gated_linear(ops, gate_up), self.summed(self.linear(down, "shared_down_linear")))
        return SharedMlp(mlp, own, None if gate is None else self.linear(gate, "shared_gate_linear", "linear"))

    def _expert_biases(self, layout: MoeLayout) -> tuple[Tensor, Tensor] | None:
        if not layout.experts[0][0].biases:
            return None
        gate_up, down = (
            torch.stack([self._join(one.biases) for one in own]) for own in zip(*layout.experts, strict=True)
        )
        return gate_up, down

    def _experts(self, layout: MoeLayout) -> Iterator[tuple[Any, Any]]:
        for gate_up, down in layout.experts:
            yield self._weight(gate_up.parts), self._weight(down.parts)

    def linear(self, matrix: Matrix, key: str, op: str = "") -> Linear:
        choice = self._linear_choice(matrix, key, op or self._layer_linear)
        linear: Linear = self._made(matrix, choice.make, quantised=choice.version.op == "fp8_linear")
        return linear

    def _linear_choice(self, matrix: Matrix, key: str, op: str) -> Choice:
        rows, columns = matrix.shape
        if self._is_stored(matrix.parts):
            op = "stored_linear"
        elif self._is_grouped(matrix.parts):
            assert self.grouped is not None
            op = "fp8_linear" if self.grouped.multiplies_fp8(matrix.parts) else "grouped_linear"
        keeps_size = self.grouped is not None
        return self.choose(
            op,
            key,
            in_features=columns,
            out_features=rows,
            int8=self._int8,
            keeps_size=keeps_size,
            has_blocks=self.grouped is not None and self.grouped.has_blocks(matrix.parts),
        )

    def _gated_linear(self, ops: DecoderOps, matrix: Matrix) -> GatedLinear:
        rows, columns = matrix.shape
        linear = self._linear_choice(matrix, "gate_up_linear", self._layer_linear)
        op = linear.version.op
        quantised, grouped = op == "fp8_linear", op == "grouped_linear"
        choice = self.choose(
            "gated_linear", in_features=columns, out_features=rows, quantised=quantised, grouped=grouped
        )

        def make(weight: Any, bias: Tensor | None) -> Any:
            return choice.make(weight, bias, self.spec.activation, linear.make, ops.activation)

        gated: GatedLinear = self._made(matrix, make, quantised)
        return gated

    def _made(self, matrix: Matrix, make: Callable[[Any, Tensor | None], Any], quantised: bool) -> Any:
        """Make an op from a matrix. A matrix that is quantised here is reported afterwards, by its final size."""
        bias = self._join(matrix.biases) if matrix.biases else None
        made = make(self._weight(matrix.parts, report=not quantised), bias)
        if quantised and not self._is_grouped(matrix.parts):
            self._report(made.num_bytes - (0 if bias is None else bias.nbytes))
        return made

    # --- reading ---

    def _is_stored(self, parts: tuple[TensorSpec, ...]) -> bool:
        return self.stored is not None and self.stored.holds(parts)

    def _is_grouped(self, parts: tuple[TensorSpec, ...]) -> bool:
        return self.grouped is not None and self.grouped.holds(parts)

    def _weight(self, parts: tuple[TensorSpec, ...], report: bool = True) -> Any:
        """The matrix in the stored format of its file if the op multiplies that, else as a plain tensor."""
        if self.stored is not None and self.stored.holds(parts):
            weight = self.stored.weight(parts)
            self._report(weight.num_bytes)
            return weight
        if self.grouped is not None and self.grouped.holds(parts):
            self._report(self.grouped.num_bytes(parts))
            return self.grouped.weight(parts)
        return self._join(parts, report)

    def _join(self, parts: tuple[TensorSpec, ...], report: bool = True) -> Tensor:
        """The parts, stacked by rows."""
        if len(parts) == 1:
            return self._read(parts[0], report)
        shape = (sum(part.shape[0] for part in parts), *parts[0].shape[1:])
        joined = torch.empty(shape, dtype=self.dtype, device=self.device)
        start = 0
        for part in parts:
            joined[start : start + part.shape[0]] = self._read(part, report)
            start += part.shape[0]
        return joined

    def _read(self, part: TensorSpec, report: bool = True) -> Tensor:
        tensor = self.source.get(part.name, device=self.device, dtype=self.dtype)
        if report:
            self._report(tensor.nbytes)
        return tensor.contiguous()

    def matrix(self, part: TensorSpec) -> Tensor:
        return self._read(part)

    def vector(self, part: TensorSpec, report: bool = True) -> Tensor:
        found = self.source.get(part.name, device=self.device, dtype=torch.float32)
        if report:
            self._report(found.nbytes)
        return found

    def norm(self, part: TensorSpec) -> Tensor:
        weight = self.vector(part)
        return weight + self.spec.norm_offset if self.spec.norm_offset else weight

    def optional_norm(self, part: TensorSpec | None) -> Tensor | None:
        return None if part is None else self.norm(part)

    def hidden_norm(self, parts: NormLayout) -> Tensor:
        """Of hidden states: float32 [hidden], or of a layer norm [2, hidden], its weight and its bias."""
        if self.spec.norm_kind == "rms":
            return self.norm(parts[0])
        size = (self.spec.hidden_size,)
        own = list(parts)
        weight = self.norm(own.pop(0)) if self.spec.norm_weight else torch.ones(size, device=self.device)
        bias = self.vector(own.pop(0)) if self.spec.norm_bias else torch.zeros(size, device=self.device)
        return torch.stack((weight, bias))

    def optional_hidden_norm(self, parts: NormLayout | None) -> Tensor | None:
        return None if parts is None else self.hidden_norm(parts)

    def _report(self, num_bytes: int) -> None:
        self._done_bytes += num_bytes
        if self._progress is not None:
            self._progress(self._done_bytes, self._total_bytes)


class ShardBuilder(DecoderBuilder):
    """Of one rank of a mesh: what is split is summed or gathered over the ranks."""

    def __init__(self, *own: Any, mesh: Mesh, shard: Shard) -> None:
        super().__init__(*own)
        self.mesh, self._shard = mesh, shard
        self.counts_keys = shard.counts_keys

    def embedding_and_head(self) -> tuple[Any, Head]:
        embedding, head = super().embedding_and_head()
        shard, mesh = self._shard, self.mesh
        widths = tuple(len(tokens) for tokens in shard.vocabularies)
        split = SplitEmbedding(embedding, shard.vocabulary, shard.whole.vocab_size, mesh)
        return split, SplitHead(head, widths, mesh, self.dtype)

    def summed(self, linear: Linear) -> Linear:
        return SummedLinear(linear, self.mesh, self.dtype)

    def summed_experts(self, routed: RoutedExperts) -> RoutedExperts:
        def summed(x: Tensor, logits: Tensor) -> Tensor:
            own = routed(x, logits)
            assert isinstance(own, Tensor)  # over ranks nothing is left for a norm to sum
            return self.mesh.sum(own.float()).to(self.dtype)

        return summed

    def means(self, *parts: Tensor) -> list[Tensor]:
        sums = [part.sum(-1) for part in parts]
        sizes = [part.new_full((part.shape[0],), part.shape[1]) for part in parts]
        totals, counts = self.mesh.sum(torch.stack((*sums, *sizes), dim=1)).chunk(2, dim=1)
        return list(torch.split(totals / counts, 1, dim=1))
