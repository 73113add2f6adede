"""Which models are encoders."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

ENCODER_TYPES = frozenset(
    {"bert", "roberta", "xlm-roberta", "camembert", "distilbert", "mpnet", "modernbert", "nomic_bert", "new", "gte"}
)
"""Values of `model_type` in config.json that name an encoder."""


def is_encoder(config: Mapping[str, Any]) -> bool:
    """True if config.json describes a model that reads a whole text at once, in both directions."""
    return config.get("model_type") in ENCODER_TYPES and not config.get("is_decoder")
