"""Typed access to a model's config.json, with the family's defaults for missing keys."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from millrace.errors import ModelError


class ConfigReader:
    """A value of the wrong type or sign raises a ModelError that names its key. A null in the config overrides the
    family's default, and then counts as missing."""

    def __init__(self, config: Mapping[str, Any], defaults: Mapping[str, Any] | None = None) -> None:
        self._values = {**(defaults or {}), **config}

    def has(self, key: str) -> bool:
        return self._values.get(key) is not None

    def get(self, key: str) -> Any:
        return self._values.get(key)

    def whole(self, key: str, default: int | None = None, *, minimum: int = 1) -> int:
        value = self._required(key, default)
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
            raise self.fail(key, f"is {value!r}; it must be a whole number of at least {minimum}")
        return value

    def optional_whole(self, key: str) -> int | None:
        return self.whole(key) if self.has(key) else None

    def number(self, key: str, default: float | None = None) -> float:
        value = self._required(key, default)
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
            raise self.fail(key, f"is {value!r}; it must be a finite number")
        return float(value)

    def positive(self, key: str, default: float | None = None) -> float:
        value = self.number(key, default)
        if value <= 0:
            raise self.fail(key, f"is {value}; it must be above 0")
        return value

    def optional_positive(self, key: str) -> float | None:
        return self.positive(key) if self.has(key) else None

    def flag(self, key: str, default: bool = False) -> bool:
        value = self._values.get(key)
        value = default if value is None else value
        if not isinstance(value, bool):
            raise self.fail(key, f"is {value!r}; it must be true or false")
        return value

    def whole_list(self, key: str) -> list[int]:
        value = self._values.get(key)
        value = [] if value is None else value
        if not isinstance(value, list) or not all(isinstance(item, int) for item in value):
            raise self.fail(key, f"is {value!r}; it must be a list of whole numbers")
        return [int(item) for item in value]

    def fail(self, key: str, problem: str) -> ModelError:
        return ModelError(f"The model's config: {key} {problem}. Restore the model's own config.json.", param=key)

    def _required(self, key: str, default: Any) -> Any:
        value = self._values.get(key)
        value = default if value is None else value
        if value is None:
            raise self.fail(key, "is missing")
        return value
