"""The contents of a plan as values that can be compared."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np


def contents(value: object) -> Any:
    """A copy of all that a plan holds, its records and arrays included: equal for equal contents."""
    if isinstance(value, np.ndarray):
        return value.dtype.str, value.shape, value.tobytes()
    if dataclasses.is_dataclass(value):
        return {field.name: contents(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, tuple | list):
        return [contents(part) for part in value]
    return value
