"""Builds a decoder from a model's files: reads tensors one by one, joins them into fused matrices and packs those.

Peak memory: the finished parts, the matrix being joined, and the tensor just read.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterator
from contextlib import closing, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from millrace.config import Quantization, cache_dir
from millrace.errors import ConfigError, ModelError
from millrace.models.decoder import Decoder
from millrace.models.grouped import GroupedMatrices, GroupedSource
from millrace.models.layers import DecoderLayer, DecoderWeights, DenseMlp, Mlp, MoeMlp, SharedMlp
from millrace.models.mixers import MIXERS, MixerSite
from millrace.models.op_program import DecoderOps
from millrace.models.spec.families import spec_from_config
from millrace.models.spec.layout import (
    HEAD,
    LayerLayout,
    Matrix,
    ModelLayout,
    MoeLayout,
    TensorSpec,
    all_tensors,
    layout_of,
    norms_of,
)
from millrace.models.spec.model_spec import LayerSpec, ModelSpec, MoeSpec
from millrace.models.spec.rope import inverse_frequencies
from millrace.models.spec.shard import Shard, shard_of
from millrace.models.stored import KeptMatrices, QuantisedSource, StoredMatrices, multiplied_parts
from millrace.ops.attention import Attention
from millrace.ops.base.mesh import ONE_RANK, Mesh
from millrace.ops.base.quantised import with_quantise
from millrace.ops.base.routing import PLAIN_ROUTING
from millrace.ops.base.unsummed import Unsummed
from millrace.ops.base.version import Choice, dtype_name
from millrace.ops.head.split_vocabulary import SplitEmbedding, SplitHead
from millrace.ops.linear.dense import Head, Linear
from millrace.ops.linear.fp8 import fp8_missing
from millrace.ops.linear.gated import GatedLinear
from millrace.ops.linear.grouped import has_blocks
from millrace.ops.linear.stored import FORMATS, StoredLinear, StoredWeight, stored_order
from millrace.ops.linear.summed import SummedLinear
from millrace.ops.moe.experts import Experts, ExpertWeights
from millrace.ops.moe.router import Route
from millrace.ops.registry import choose
from millrace.ops.triton import triton_missing

if TYPE_CHECKING:
    from millrace.models.weights import WeightSource
    from millrace.sources.resolve import ModelFiles

log = logging.getLogger(__name__)

RoutedExperts = Callable[[Tensor, Tensor], Tensor | Unsummed]
Progress = Callable[[int, int], None]
"""Called with (done_bytes, total_bytes)."""

_COMPUTED_BUFFER = re.compile(r".*\.(rotary_emb\.inv_freq|masked_bias|attn\.bias)")
"""Buffers in old checkpoints that are not needed: they are computed."""
_LAYER_TENSOR = re.compile(r"model\.layers\.(?P<index>\d+)\..*")


def load_decoder(
    files: ModelFiles,
    *,
    device: torch.device,
    dtype: torch.dtype,
    deterministic: bool = False,
    quantization: Quantization = "none",
    seed: int = 0,
    progress: Progress | None = None,
    mesh: Mesh = ONE_RANK,
) -> Decoder:
    """Load a model, or this rank's part of it, onto the device. A tensor that does not match the config raises a
    ModelError that names it."""
    from millrace.models.weights import open_weights  # local: imports the readers of all formats

    check_quantization(quantization, device, dtype)
    return build_decoder(
        spec_from_config(files.config),
        open_weights(files, seed=seed),
        device=device,
        dtype=dtype,
        deterministic=deterministic,
        quantization=quantization,
        progress=progress,
        mesh=mesh,
    )


def check_quantization(quantization: Quantization, device: torch.device, dtype: torch.dtype) -> None:
    """Raise ConfigError if this device or dtype does not support the quantization."""
    if quantization == "none":
        return
    if quantization == "int8":
        return _check_int8(device, dtype)
    if fp8_missing(device):
        where = "the CPU" if device.type == "cpu" else torch.cuda.get_device_name(device)
        raise ConfigError(
            f"model.quantization is {quantization}, which needs a GPU of compute capability 8.9 or later, but the model"
            f" would run on {where}. Set --quantization none, or use such a GPU.",
            param="model.quantization",
        )
    if dtype != torch.bfloat16:
        raise ConfigError(
            f"model.quantization is {quantization}, which needs bfloat16 for everything else, but model.dtype is"
            f" {dtype_name(dtype)}. Set --dtype bfloat16.",
            param="model.dtype",
        )


def _check_int8(device: torch.device, dtype: torch.dtype) -> None:
    if device.type != "cpu":
        raise ConfigError(
            "model.quantization is int8, which runs only on a CPU. Set --quantization none, or --device cpu.",
            param="model.quantization",
        )
    if dtype != torch.float32:
        raise ConfigError(
            "model.quantization is int8, which needs float32 for everything else, but model.dtype is"
            f" {dtype_name(dtype)}. Set --dtype float32 or auto.",
            param="model.dtype",
        )


def has_quantised_weights(files: ModelFiles) -> bool:
    """Whether some of the model's matrices have a quantised format that the CPU kernels read. Reads no weights."""
    from millrace.models.weights import open_weights

    if not is_quantised(files):
        return False
    source, layout = open_weights(files), layout_of(spec_from_config(files.config))
    parts = (part for matrix in multiplied_parts(layout) for part in matrix)
    return isinstance(source, QuantisedSource) and any(source.stored_format(part.name) in FORMATS for part in parts)


def is_quantised(files: ModelFiles) -> bool:
    """Whether the files may have quantised weights."""
    return files.kind == "gguf" or bool(files.config.get("quantization_config"))


def weight_bytes(
    files: ModelFiles,
    dtype: torch.dtype,
    quantization: Quantization = "none",
    device: torch.device | None = None,
    shard: Shard | None = None,
) -> int:
    """Bytes of weights that load_decoder will hold, by default on the CPU and of the whole model. Reads no weights."""
    from millrace.models.weights import open_weights
    from millrace.models.weights.shard_weights import ShardWeights

    layout = layout_of(spec_from_config(files.config)) if shard is None else shard.layout
    spec = spec_from_config(files.config) if shard is None else shard.spec
    total = layout_bytes(spec, layout, dtype, quantization)
    if not is_quantised(files):
        return total
    source, device = open_weights(files), device or torch.device("cpu")
    if shard is not None:
        source = ShardWeights(source, shard)
    stored = stored_matrices(source, layout, device, dtype, quantization)
    grouped = grouped_matrices(source, layout, device, dtype, stored, quantization)
    return total - sum(kept.saved_bytes() for kept in (stored, grouped) if kept is not None)


def stored_matrices(
    source: WeightSource,
    layout: ModelLayout,
    device: torch.device,
    dtype: torch.dtype,
    quantization: Quantization,
    mesh: Mesh = ONE_RANK,
) -> StoredMatrices | None:
    """The matrices that stay in the quantised format of their file; None if all are dequantised."""
    if quantization == "fp8" or not isinstance(source, QuantisedSource):
        return None
    keeps_size = isinstance(source, GroupedSource)
    order = stored_order(choose("stored_linear", device, dtype, int8=quantization == "int8", keeps_size=keeps_size))
    part = f"{mesh.rank} of {mesh.size}" if mesh.size > 1 else ""
    return None if order is None else StoredMatrices(source, layout, dtype, cache_dir() / "packed", order, part)


def grouped_matrices(
    source: WeightSource,
    layout: ModelLayout,
    device: torch.device,
    dtype: torch.dtype,
    stored: KeptMatrices | None,
    quantization: Quantization = "none",
) -> GroupedMatrices | None:
    """The other matrices that stay as a quantised checkpoint stores them; None if the source is none."""
    if isinstance(source, GroupedSource):
        return GroupedMatrices(source, layout, device, dtype, stored)
    reads_blocks = device.type == "cuda" and dtype in (torch.bfloat16, torch.float16) and not triton_missing(device)
    if not reads_blocks or quantization != "none" or not isinstance(source, QuantisedSource):
        return None
    from millrace.models.formats.gguf import GgufMatrices  # local: imports the reader of GGUF

    return GroupedMatrices(GgufMatrices(source, layout), layout, device, dtype, stored)


def spec_weight_bytes(spec: ModelSpec, dtype: torch.dtype, quantization: Quantization = "none") -> int:
    """Bytes of all weights: matrices and biases in the model's dtype, quantised matrices in 8 bits with a scale per
    output, norms and rotary frequencies in float32."""
    return layout_bytes(spec, layout_of(spec), dtype, quantization)


def layout_bytes(spec: ModelSpec, layout: ModelLayout, dtype: torch.dtype, quantization: Quantization = "none") -> int:
    """The same of these tensors."""
    norms = sum(norm.num_items for layer in layout.layers for norm in norms_of(layer)) + layout.final_norm.num_items
    frequencies = sum(rope.rotary_dim // 2 for rope in spec.ropes)
    items = sum(part.num_items for part in all_tensors(layout)) - norms
    total = items * dtype.itemsize + 4 * (norms + frequencies)
    if quantization == "fp8":
        for matrix in quantised_matrices(layout):
            rows, columns = matrix.shape
            total += rows * columns * (1 - dtype.itemsize) + 4 * rows
    return total


def quantised_matrices(layout: ModelLayout) -> Iterator[Matrix]:
    """The matrices that `--quantization` applies to: those of the layers, except routers and experts."""
    for layer in layout.layers:
        yield from layer.mixer.matrices()
        mlp = layer.mlp
        yield from (mlp.shared or ()) if isinstance(mlp, MoeLayout) else mlp


def build_decoder(
    spec: ModelSpec,
    source: WeightSource,
    *,
    device: torch.device,
    dtype: torch.dtype,
    deterministic: bool = False,
    quantization: Quantization = "none",
    progress: Progress | None = None,
    mesh: Mesh = ONE_RANK,
) -> Decoder:
    """Build a decoder of this spec, or this rank's part of it, with the weights of any source that uses Hugging Face
    names."""
    layout, shard = layout_of(spec), None
    check_tensors(spec, layout, source)
    if mesh.size > 1:
        from millrace.models.weights.shard_weights import ShardWeights  # local: imports the reader of GGUF

        shard = shard_of(spec, mesh.rank, mesh.size)
        spec, layout, source = shard.spec, shard.layout, ShardWeights(source, shard)
    if quantization == "fp8" and spec.moe is not None:
        log.warning(
            "quantization %s: the experts stay in %s; only the other matrices of the layers are held in 8 bits",
            quantization,
            dtype_name(dtype),
        )
    if quantization == "fp8" and isinstance(source, GroupedSource):
        raise ConfigError(
            "model.quantization is fp8, but the checkpoint is quantised already. Set --quantization auto.",
            param="model.quantization",
        )
    stored = stored_matrices(source, layout, device, dtype, quantization, mesh)
    own = (spec, layout, source, stored, device, dtype, deterministic, quantization, progress)
    builder = DecoderBuilder(*own) if shard is None else ShardBuilder(*own, mesh=mesh, shard=shard)
    if builder.grouped is not None:
        builder.grouped.warn()
    with nullcontext() if stored is None else closing(stored):
        return builder.build()


# --- checking the tensors ---


def check_tensors(spec: ModelSpec, layout: ModelLayout, source: WeightSource) -> None:
    """Check that every needed tensor exists with the right shape, and that no tensor of a layer is left over."""
    names = set(source.names())
    needed = {part.name: part.shape for part in all_tensors(layout)}
    for name, shape in needed.items():
        if name not in names:
            raise _missing(spec, source, name, shape)
        if source.shape(name) != shape:
            raise ModelError(
                f"{source.file_of(name)}: tensor {name} has shape {source.shape(name)}; the config requires {shape}."
                " The config and the weights belong to different models; download both again."
            )
    _check_leftovers(spec, source, names - needed.keys())


def _missing(spec: ModelSpec, source: WeightSource, name: str, shape: tuple[int, ...]) -> ModelError:
    some = next(iter(source.names()), None)
    where = "The model's files" if some is None else str(source.file_of(some).parent)
    remedy = "Download the model again; a file is missing or truncated, or the config belongs to another model."
    if name == HEAD:
        remedy = "If the model uses its embedding as the LM head, set tie_word_embeddings to true in its config."
    return ModelError(f"{where}: no tensor {name} of shape {shape}, which a {spec.family} model needs. {remedy}")


def _check_leftovers(spec: ModelSpec, source: WeightSource, leftovers: set[str]) -> None:
    unused = sorted(name for name in leftovers if not _COMPUTED_BUFFER.fullmatch(name) and name != HEAD)
    for name in unused:
        match = _LAYER_TENSOR.fullmatch(name)
        if match is not None and int(match["index"]) < spec.num_layers:
            raise ModelError(
                f"{source.file_of(name)}: tensor {name} does not belong to a {spec.family} model, so the output would"
                " be wrong. Check that config.json belongs to these weights."
            )
    if unused:
        log.warning("%d tensors are not used by the decoder: %s", len(unused), ", ".join(unused[:8]))


# --- building ---


class DecoderBuilder:
    """Binds the tensors of a source to the ops chosen for a device and dtype."""

    mesh: Mesh = ONE_RANK

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
            final_norm=self.norm(self.layout.final_norm) * spec.hidden_scale,
            head=head,
            frequencies=frequencies,
            num_bytes=self._total_bytes,
        )
        use_decode_kernels = not self.deterministic
        return Decoder(spec, weights, ops, self.device, self.dtype, self.choices, use_decode_kernels, self.mesh)

    def choose(self, op: str, key: str = "", **shape: Any) -> Choice:
        choice = choose(op, self.device, self.dtype, self.deterministic, **shape)
        self.choices[key or op] = choice
        return choice

    def ops(self) -> DecoderOps:
        spec = self.spec
        return DecoderOps(
            rms_norm=with_quantise(self.choose("rms_norm").make()),
            add_rms_norm=with_quantise(self.choose("add_rms_norm").make()),
            gated=with_quantise(self.choose("gated").make(spec.activation)),
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
            input_norm=self.optional_norm(layout.input_norm),
            mixer=MIXERS[spec.mixer](self, MixerSite(spec, layout.mixer, kv_group, kv_index)),
            mixer_out_norm=self.optional_norm(layout.mixer_out_norm),
            mlp_norm=self.optional_norm(layout.mlp_norm),
            mlp=self._mlp(ops, layout.mlp),
            mlp_out_norm=self.optional_norm(layout.mlp_out_norm),
        )

    def summed(self, linear: Linear) -> Linear:
        """A linear whose result is added to the residual: over all ranks of a mesh."""
        return linear

    def summed_experts(self, routed: RoutedExperts) -> RoutedExperts:
        return routed

    def mean(self, x: Tensor) -> Tensor:
        """The mean over the last dimension, float32 [T, 1], of x [T, own] of all ranks."""
        return x.mean(-1, keepdim=True)

    def _mlp(self, ops: DecoderOps, layout: tuple[Matrix, Matrix] | MoeLayout) -> Mlp:
        if isinstance(layout, MoeLayout):
            return self._moe(ops, layout)
        gate_up, down = layout
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
        norms_add = all(self.choices[op].version.name == "triton" for op in ("rms_norm", "add_rms_norm"))
        unsummed = norms_add and layout.shared is None

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
            return choice.make(weight, bias, self.spec.activation, linear.make, ops.gated)

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

    def vector(self, part: TensorSpec) -> Tensor:
        found = self.source.get(part.name, device=self.device, dtype=torch.float32)
        self._report(found.nbytes)
        return found

    def norm(self, part: TensorSpec) -> Tensor:
        weight = self.vector(part)
        return weight + self.spec.norm_offset if self.spec.norm_offset else weight

    def optional_norm(self, part: TensorSpec | None) -> Tensor | None:
        return None if part is None else self.norm(part)

    def _report(self, num_bytes: int) -> None:
        self._done_bytes += num_bytes
        if self._progress is not None:
            self._progress(self._done_bytes, self._total_bytes)


class ShardBuilder(DecoderBuilder):
    """Of one rank of a mesh: what is split is summed or gathered over the ranks."""

    def __init__(self, *own: Any, mesh: Mesh, shard: Shard) -> None:
        super().__init__(*own)
        self.mesh, self._shard = mesh, shard

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
            assert isinstance(own, Tensor), "experts are split on a CPU only"
            return self.mesh.sum(own.float()).to(self.dtype)

        return summed

    def mean(self, x: Tensor) -> Tensor:
        sums = torch.stack((x.sum(-1), x.new_full((x.shape[0],), x.shape[1])), dim=1)
        total = self.mesh.sum(sums)
        return total[:, :1] / total[:, 1:]
