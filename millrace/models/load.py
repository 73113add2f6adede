"""Builds a decoder from a model's files: reads tensors one by one, joins them into fused matrices and packs those.

Peak memory: the finished parts, the matrix being joined, and the tensor just read.
"""

from __future__ import annotations

import logging
from contextlib import closing, nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from millrace.config import Quantization
from millrace.errors import ConfigError
from millrace.models.builder import DecoderBuilder, Progress, ShardBuilder
from millrace.models.checking import check_tensors
from millrace.models.decoder import Decoder
from millrace.models.grouped import GroupedSource
from millrace.models.kept_weights import grouped_matrices, stored_matrices
from millrace.models.spec.families import spec_from_config
from millrace.models.spec.layout import (
    layout_of,
)
from millrace.models.spec.model_spec import ModelSpec
from millrace.models.spec.shard import Shard, shard_of
from millrace.models.stored import QuantisedSource, multiplied_parts
from millrace.models.weight_sizes import layout_bytes
from millrace.ops.base.mesh import ONE_RANK, Mesh
from millrace.ops.base.version import dtype_name
from millrace.ops.linear.fp8 import fp8_missing
from millrace.ops.linear.stored import FORMATS
from millrace.sources.hf_config import is_multimodal

if TYPE_CHECKING:
    from millrace.models.weights import WeightSource
    from millrace.sources.resolve import ModelFiles

log = logging.getLogger(__name__)


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
    if is_multimodal(files.config) and mesh.rank == 0:
        log.warning("of this %s the language model is loaded: it takes text, no pictures", files.config["model_type"])
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


def load_ends(
    files: ModelFiles,
    *,
    device: torch.device,
    dtype: torch.dtype,
    deterministic: bool = False,
    quantization: Quantization = "none",
    seed: int = 0,
) -> Decoder:
    """The whole embedding and head, and one layer: for a drafter that reads those of a model split over ranks."""
    from millrace.models.weights import open_weights

    return build_decoder(
        _ends_of(files),
        open_weights(files, seed=seed),
        device=device,
        dtype=dtype,
        deterministic=deterministic,
        quantization=quantization,
    )


def ends_bytes(files: ModelFiles, dtype: torch.dtype, quantization: Quantization) -> int:
    """Of weights that `load_ends` will hold, if the files are not quantised; else an upper bound."""
    spec = _ends_of(files)
    return layout_bytes(spec, layout_of(spec), dtype, quantization)


def _ends_of(files: ModelFiles) -> ModelSpec:
    spec = spec_from_config(files.config)
    return replace(spec, layers=spec.layers[:1])


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
    from millrace.sources.resolve import RANDOM_FORMAT  # local: imports the reader of GGUF

    return files.kind == "gguf" or any(files.config.get(key) for key in ("quantization_config", RANDOM_FORMAT))


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
