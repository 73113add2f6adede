"""Weight formats. Whatever a model's files are, they are read as tensors with Hugging Face names."""

from millrace.models.weights.open import open_weights
from millrace.models.weights.source import WeightSource

__all__ = ["WeightSource", "open_weights"]
