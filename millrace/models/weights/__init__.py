"""Readers of weight formats. All of them return tensors by Hugging Face name.

Start with `source.py`, the interface; `open.py` chooses the reader. Imports `models.spec` and `sources`.
"""

from millrace.models.weights.open import open_weights
from millrace.models.weights.source import WeightSource

__all__ = ["WeightSource", "open_weights"]
