"""Which models are encoders."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

ENCODER_TYPES = frozenset(
    {
        "bert",
        "electra",
        "roberta",
        "xlm-roberta",
        "camembert",
        "distilbert",
        "mpnet",
        "modernbert",
        "nomic_bert",
        "new",
        "gte",
    }
)
"""Values of `model_type` in config.json that name an encoder."""


def is_encoder(config: Mapping[str, Any]) -> bool:
    """True if config.json describes a model that reads a whole text at once, in both directions."""
    return config.get("model_type") in ENCODER_TYPES and not config.get("is_decoder")


_INSTEAD = {
    "deberta": "bge-reranker or a cross-encoder of BERT, ELECTRA or RoBERTa",
    "eurobert": "ModernBERT (gte-modernbert-base)",
    "gemma": "Qwen3-Embedding or nomic-embed-text-v1.5",
    "jina": "jina-embeddings-v2-base-en or bge-m3",
    "modern-bert": "its safetensors files",
    "neo-bert": "ModernBERT (gte-modernbert-base)",
    "nomic-bert-moe": "nomic-embed-text-v1.5 or bge-m3",
    "t5encoder": "E5 or gte",
}
"""What can be loaded in place of encoders that cannot, by the beginning of their architecture."""


def instead_of(architecture: object) -> str:
    """A sentence that names models which work in place of this encoder; "" for other models."""
    name = str(architecture).lower()
    found = next((models for start, models in _INSTEAD.items() if name.startswith(start)), "")
    is_gemma = name.startswith("gemma") and "embedding" not in name
    return f" In its place use {found}." if found and not is_gemma else ""
