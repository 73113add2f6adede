"""Chooses the reader for a model's files."""

from __future__ import annotations

from millrace.models.formats.read import format_of
from millrace.models.spec.families import spec_from_config
from millrace.models.spec.layout import layout_of
from millrace.models.weights.gguf_weights import GgufWeights
from millrace.models.weights.quantised_weights import QuantisedWeights
from millrace.models.weights.random_formats import RandomTensors, open_random
from millrace.models.weights.safetensors_weights import SafetensorsWeights
from millrace.models.weights.source import WeightSource
from millrace.sources.gguf.model import open_gguf_model
from millrace.sources.resolve import ModelFiles


def open_weights(files: ModelFiles, *, seed: int = 0) -> WeightSource:
    """Open the files without reading tensors. `seed` affects only random weights."""
    if files.kind == "gguf":
        return GgufWeights(open_gguf_model(files.path), files.config)
    if files.kind == "safetensors":
        stored = SafetensorsWeights(files.path, files.weights, files.config)
        quantised = format_of(files.config, stored)
        if quantised is None:
            return stored
        return QuantisedWeights(stored, layout_of(spec_from_config(files.config)), quantised)
    random = open_random(files.path, files.config, seed)
    if isinstance(random, RandomTensors):
        quantised = format_of({"quantization_config": random.settings}, random)
        assert quantised is not None
        return QuantisedWeights(random, layout_of(spec_from_config(files.config)), quantised)
    return random
