"""Whether a model was trained to give embeddings, as its files say. Any decoder gives vectors, but those of others
compare badly."""

from __future__ import annotations

from millrace.sources.gguf.model import open_gguf_model
from millrace.sources.resolve import ModelFiles

_MARKERS = ("modules.json", "config_sentence_transformers.json")
"""Files of sentence-transformers, which models for embeddings come with."""


def is_trained_to_embed(files: ModelFiles) -> bool:
    if files.kind == "gguf":
        metadata = open_gguf_model(files.path).metadata
        if metadata.get(f"{metadata.get('general.architecture')}.pooling_type"):
            return True
    if files.kind in ("safetensors", "onnx") and any((files.path / name).is_file() for name in _MARKERS):
        return True
    return "embed" in files.name.lower()
