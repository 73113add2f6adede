"""Priority classes as clients name them and as the engine numbers them."""

from __future__ import annotations

from typing import Literal

from millrace.params import CLASS_NAMES
from millrace.serve.generate.checks import check_range

PriorityClass = Literal["interactive", "standard", "batch"]
PRIORITY_CLASSES: dict[str, int] = {name: number for number, name in enumerate(CLASS_NAMES)}
STANDARD, BATCH = PRIORITY_CLASSES["standard"], PRIORITY_CLASSES["batch"]


def priority_of(value: str | int | None) -> int:
    if value is None:
        return STANDARD
    if isinstance(value, str):
        return PRIORITY_CLASSES[value]
    check_range("priority", value, 0, len(CLASS_NAMES) - 1)
    return value
