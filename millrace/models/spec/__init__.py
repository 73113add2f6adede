"""From a config.json to a ModelSpec, and from a ModelSpec to the tensors it needs. Plain data; no weights are read.

Start with `model_spec.py`; `families.py` is where a model family is added. Imports no other part of `models`.
"""
