"""Reads an encoder and its head from the files of a model."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from millrace.errors import ModelError
from millrace.models.encoders.encoder import Activation, Encoder, EncoderWeights, activation_of
from millrace.models.encoders.heads import Head, PooledVectors, SparseWeights, TextLogits, TokenLogits, TokenVectors
from millrace.models.encoders.layers import EncoderLayer, Linear, Norm, Product
from millrace.models.encoders.spec import EncoderSpec, encoder_spec
from millrace.models.weights.gguf_weights import GgufWeights
from millrace.models.weights.onnx_weights import OnnxWeights
from millrace.models.weights.safetensors_weights import SafetensorsWeights
from millrace.models.weights.source import WeightSource
from millrace.ops.linear.stored import StoredLinear, fits_int8, int8_weight
from millrace.sources.encoders.encoder_files import DenseModule, EncoderFiles, read_encoder
from millrace.sources.encoders.retrieval_files import SparseForm
from millrace.sources.gguf.model import open_gguf_model
from millrace.sources.resolve import ModelFiles


@dataclass(frozen=True, slots=True)
class LoadedEncoder:
    encoder: Encoder
    head: Head
    files: EncoderFiles


def load_encoder(files: ModelFiles, *, device: torch.device, dtype: torch.dtype, int8: bool = False) -> LoadedEncoder:
    """`int8`: products of the layers are of 8-bit integers, on a CPU in float32."""
    described = read_encoder(files)
    if files.kind == "random" or described is None:
        raise ModelError(f"{files.path}: encoders need safetensors, GGUF or ONNX files. Give a directory with them.")
    source = _Tensors(_open(files), device, dtype)
    spec = encoder_spec(files.config, frozenset(source.names))
    body = _Body(source, spec, int8)
    return LoadedEncoder(Encoder(spec, body.weights()), _head(body, described), described)


def _open(files: ModelFiles) -> WeightSource:
    if files.kind == "onnx":
        return OnnxWeights(files.weights[0])
    if files.kind == "gguf":
        return GgufWeights(open_gguf_model(files.path), files.config)
    return SafetensorsWeights(files.path, files.weights, files.config)


class _Tensors:
    """Tensors by name, checked against the shape that the config asks for."""

    def __init__(self, source: WeightSource, device: torch.device, dtype: torch.dtype) -> None:
        self._source, self._device, self._dtype = source, device, dtype
        # TensorFlow's names of a norm's parts, which old checkpoints have.
        self.names = {
            name.replace("LayerNorm.gamma", "LayerNorm.weight").replace("LayerNorm.beta", "LayerNorm.bias"): name
            for name in source.names()
        }

    def __contains__(self, name: str) -> bool:
        return name in self.names

    def get(self, name: str, shape: tuple[int, ...] | None = None) -> Tensor:
        stored = self.names.get(name, name)
        found = self._source.shape(stored)
        if shape is not None and found != shape:
            file = self._source.file_of(stored)
            raise ModelError(f"{file}: tensor {stored} has the shape {found}; config.json asks for {shape}.")
        return self._source.get(stored, device=self._device, dtype=self._dtype)

    def linear(self, name: str, shape: tuple[int, int]) -> Linear:
        bias = self.get(f"{name}.bias", shape[:1]) if f"{name}.bias" in self else None
        return Linear(self.get(f"{name}.weight", shape), bias)

    def norm(self, name: str, width: int, eps: float) -> Norm:
        bias = self.get(f"{name}.bias", (width,)) if f"{name}.bias" in self else None
        return Norm(self.get(f"{name}.weight", (width,)), bias, eps)


class _Body:
    def __init__(self, source: _Tensors, spec: EncoderSpec, int8: bool) -> None:
        self.source, self.spec, self._int8 = source, spec, int8
        words = f"{spec.names.words}.weight"
        # A model with a head stores its body under a name of its own.
        found = [name.removesuffix(words) for name in source.names if name.endswith(words)]
        if len(found) != 1:
            raise ModelError(f"The files must have one tensor {words}; they have {len(found)}. Download them again.")
        self.prefix = found[0]

    def weights(self) -> EncoderWeights:
        spec, names, hidden = self.spec, self.spec.names, self.spec.hidden_size
        table, width = self._table, spec.embedding_size or hidden
        project = f"{self.prefix}embeddings_project"
        return EncoderWeights(
            words=self.source.get(f"{self.prefix}{names.words}.weight", (spec.vocab_size, width)),
            embedding_norm=self.source.norm(self.prefix + names.embedding_norm, width, spec.eps),
            project=self.source.linear(project, (hidden, width)) if width != hidden else None,
            layers=tuple(self._layer(index) for index in range(spec.num_layers)),
            positions=table(names.positions),
            types=table(names.types),
            final_norm=self._norm(names.final_norm) if names.final_norm else None,
            relative_bias=table(names.relative_bias),
        )

    def _layer(self, index: int) -> EncoderLayer:
        spec, names = self.spec, self.spec.names.names
        before = f"{self.prefix}{self.spec.names.layer.format(index)}."
        hidden, wide = spec.hidden_size, spec.intermediate_size
        up = self._joined(before, names.up, wide * (2 if spec.is_gated else 1))
        if spec.gate_is_last:
            up = Linear(_halves_swapped(up.weight), None if up.bias is None else _halves_swapped(up.bias))
        has_norm = f"{before}{names.attention_norm}.weight" in self.source or not (spec.is_pre_norm and index == 0)
        return EncoderLayer(
            qkv=self._product(self._joined(before, names.qkv, 3 * hidden)),
            out=self._product(self.source.linear(before + names.out, (hidden, hidden))),
            attention_norm=self.source.norm(before + names.attention_norm, hidden, spec.eps) if has_norm else None,
            up=self._product(up),
            down=self._product(self.source.linear(before + names.down, (hidden, wide))),
            mlp_norm=self.source.norm(before + names.mlp_norm, hidden, spec.eps),
        )

    def _product(self, linear: Linear) -> Product:
        if not self._int8:
            return linear
        if not fits_int8(linear.weight.shape):
            width = linear.weight.shape[1]
            raise ModelError(f"INT8 products need widths that are multiples of 32; a layer of this model has {width}.")
        return StoredLinear(int8_weight(linear.weight), linear.bias)

    def _joined(self, before: str, names: tuple[str, ...], num_rows: int) -> Linear:
        rows = num_rows // len(names)
        parts = [self.source.linear(before + name, (rows, self.spec.hidden_size)) for name in names]
        return parts[0] if len(parts) == 1 else Linear(_cat(part.weight for part in parts), _cat_biases(parts))

    def _table(self, name: str) -> Tensor | None:
        return self.source.get(f"{self.prefix}{name}.weight") if name else None

    def _norm(self, name: str) -> Norm:
        return self.source.norm(self.prefix + name, self.spec.hidden_size, self.spec.eps)


def _halves_swapped(rows: Tensor) -> Tensor:
    return torch.cat(rows.chunk(2)[::-1])


def _cat(parts: Iterable[Tensor]) -> Tensor:
    return torch.cat(list(parts))


def _cat_biases(parts: list[Linear]) -> Tensor | None:
    return None if parts[0].bias is None else _cat(part.bias for part in parts if part.bias is not None)


def _head(body: _Body, described: EncoderFiles) -> Head:
    if described.task == "embed":
        return _pooled(body, described)
    if described.task == "multi":
        modules, width = _dense_modules(body, described, body.spec.hidden_size)
        return TokenVectors(modules, described.normalises, width)
    if described.sparse is not None:
        return _sparse(body, described.sparse)
    source, spec, num_labels, hidden = body.source, body.spec, len(described.labels), body.spec.hidden_size
    square, classes = (hidden, hidden), (num_labels, hidden)
    is_modern = spec.family == "modernbert"
    norm = source.norm("head.norm", hidden, spec.eps) if is_modern else None
    if described.task == "tag":
        dense = source.linear("head.dense", square) if is_modern else None
        activation = activation_of(spec.classifier_activation)
        return TokenLogits(dense, activation, norm, source.linear("classifier", classes), num_labels)
    if is_modern:
        pooling, act = spec.classifier_pooling, activation_of(spec.classifier_activation)
        dense, last = source.linear("head.dense", square), "classifier"
        return TextLogits(
            "mean" if pooling == "mean" else "cls", dense, act, norm, source.linear(last, classes), num_labels
        )
    before, name, last = _CLASSIFIERS.get(spec.family, ("", "classifier.dense", "classifier.out_proj"))
    if before == "body":
        name = body.prefix + name
    dense = source.linear(name, square)
    act = activation_of({"distilbert": "relu", "electra": "gelu"}.get(spec.family, "tanh"))
    return TextLogits("cls", dense, act, None, source.linear(last, classes), num_labels)


_POOLER = ("body", "pooler.dense", "classifier")
_CLASSIFIERS = {
    "bert": _POOLER,
    "jina_bert": _POOLER,
    "nomic_bert": _POOLER,
    "gte": _POOLER,
    "distilbert": ("", "pre_classifier", "classifier"),
}
"""By family: whether the hidden layer belongs to the body, its name, and the name of the last layer."""


def _pooled(body: _Body, described: EncoderFiles) -> PooledVectors:
    dense, width = _dense_modules(body, described, body.spec.hidden_size * len(described.pooling))
    return PooledVectors(described.pooling, dense, described.normalises, width)


def _dense_modules(
    body: _Body, described: EncoderFiles, width: int
) -> tuple[tuple[tuple[Linear, Activation], ...], int]:
    """The layers and the width of the last one's results; `width`: of what the first one takes."""
    dense = []
    for module in described.dense:
        if module.in_features != width:
            raise ModelError(
                f"{module.folder} takes {module.in_features} numbers, but the module before gives {width}."
            )
        linear = _read_dense(body, module)
        dense.append((linear, activation_of(module.activation)))
        width = linear.weight.shape[0]
    return tuple(dense), width


_LM_HEADS = {
    "distilbert": ("vocab_transform", ("vocab_layer_norm",), "vocab_projector"),
    "modernbert": ("head.dense", ("head.norm",), "decoder"),
    "electra": ("generator_predictions.dense", ("generator_predictions.LayerNorm",), "generator_lm_head"),
    "bert": ("cls.predictions.transform.dense", ("cls.predictions.transform.LayerNorm",), "cls.predictions.decoder"),
    "nomic_bert": (
        "cls.predictions.transform.dense",
        ("cls.predictions.transform.layer_norm", "cls.predictions.transform.LayerNorm"),
        "cls.predictions.decoder",
    ),
}
"""By family: the hidden layer, names of its norm, and the layer over the vocabulary."""
_ROBERTA_LM_HEAD = ("lm_head.dense", ("lm_head.layer_norm", "lm_head.norm"), "lm_head.decoder")


def _sparse(body: _Body, form: SparseForm) -> SparseWeights:
    source, spec, hidden = body.source, body.spec, body.spec.hidden_size
    dense, norms, last = _LM_HEADS.get(spec.family, _ROBERTA_LM_HEAD)
    if f"{dense}.weight" not in source:
        raise ModelError(f"A SPLADE model needs the head of a masked language model, but there is no {dense}.weight.")
    norm = next((name for name in norms if f"{name}.weight" in source), norms[0])
    # Most files leave out the layer over the vocabulary, which is the embedding of words.
    tied = f"{body.prefix}{spec.names.words}"
    stored = last if f"{last}.weight" in source else tied
    biases = [name for name in (f"{last}.bias", f"{last.rpartition('.')[0]}.bias") if name in source]
    width = spec.embedding_size or hidden
    vocabulary = Linear(
        source.get(f"{stored}.weight", (spec.vocab_size, width)),
        source.get(biases[0], (spec.vocab_size,)) if biases else None,
    )
    activation = {
        "roberta": "gelu",
        "xlm-roberta": "gelu",
        "camembert": "gelu",
        "mpnet": "gelu",
        "electra": "gelu",
    }.get(spec.family)
    if spec.family == "modernbert":
        activation = spec.classifier_activation
    return SparseWeights(
        source.linear(dense, (width, hidden)),
        activation_of(activation or spec.activation),
        source.norm(norm, width, spec.eps),
        vocabulary,
        form,
        spec.vocab_size,
    )


def _read_dense(body: _Body, module: DenseModule) -> Linear:
    if module.out_features == 0:
        return Linear(body.source.get("linear.weight"), None)
    path = module.folder / "model.safetensors"
    source = SafetensorsWeights(module.folder, (path,), {})
    words = body.source.get(f"{body.prefix}{body.spec.names.embedding_norm}.weight")

    def read(name: str) -> Tensor:
        return source.get(name, device=words.device, dtype=words.dtype)

    return Linear(read("linear.weight"), read("linear.bias") if module.has_bias else None)
