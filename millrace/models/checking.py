"""Checks that a model's files have the tensors that its config requires."""

from __future__ import annotations

import logging
import re
from typing import TYPE_CHECKING

from millrace.errors import ModelError
from millrace.models.spec.layout import (
    HEAD,
    ModelLayout,
    all_tensors,
)
from millrace.models.spec.model_spec import ModelSpec

if TYPE_CHECKING:
    from millrace.models.weights import WeightSource


log = logging.getLogger(__name__)

_COMPUTED_BUFFER = re.compile(r".*\.(rotary_emb\.inv_freq|masked_bias|attn\.bias|attention\.bias)")
"""Buffers in old checkpoints that are not needed: they are computed."""
_LAYER_TENSOR = re.compile(r"model\.layers\.(?P<index>\d+)\..*")


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
