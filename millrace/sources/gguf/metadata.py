"""Typed access to GGUF metadata. Errors name the file and the key."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from millrace.errors import ModelError
from millrace.sources.gguf.model import GgufModel


class Metadata:
    """Metadata of one model. Keys are given without the architecture prefix."""

    def __init__(self, model: GgufModel, arch: str) -> None:
        self.model, self.arch = model, arch

    def fail(self, key: str, problem: str) -> ModelError:
        return ModelError(
            f"{self.model.path}: metadata '{self.arch}.{key}' {problem}. Convert the model again or use another file."
        )

    def get(self, key: str) -> Any:
        return self.model.metadata.get(f"{self.arch}.{key}")

    def whole(self, key: str, default: int | None = None, *, minimum: int = 1) -> int:
        """A whole number. A list with one value per layer is accepted if all values are equal."""
        value = self.get(key)
        if isinstance(value, list) and value and all(item == value[0] for item in value):
            value = value[0]
        if value is None:
            if default is None:
                raise self.fail(key, "is missing")
            return default
        if isinstance(value, list):
            raise self.fail(key, "differs between layers, which is not supported")
        if isinstance(value, bool) or not isinstance(value, int) or not minimum <= value < 2**31:
            raise self.fail(key, f"is {value!r}, not a whole number of at least {minimum}")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """A finite number. A 32-bit value is returned as its shortest decimal: 1e-06, not 9.99999997e-07."""
        value = self.get(key)
        if value is None:
            if default is None:
                raise self.fail(key, "is missing")
            return default
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
            raise self.fail(key, f"is {value!r}, not a finite number")
        short = float(str(np.float32(value)))
        return short if np.float32(short) == np.float32(value) and float(np.float32(value)) == value else float(value)

    def token_id(self, name: str) -> int | None:
        value = self.model.metadata.get(f"tokenizer.ggml.{name}_token_id")
        return value if isinstance(value, int) and 0 <= value < 2**31 else None
