"""Priority classes as clients name them and as the engine numbers them."""

from __future__ import annotations

from typing import Literal

from millrace.errors import BadRequest
from millrace.params.classes import CLASS_NAMES
from millrace.serve.generate.checks import check_range

PriorityClass = Literal["interactive", "standard", "batch"]
PRIORITY_CLASSES: dict[str, int] = {name: number for number, name in enumerate(CLASS_NAMES)}
STANDARD, BATCH = PRIORITY_CLASSES["standard"], PRIORITY_CLASSES["batch"]


ServiceTier = Literal["auto", "default", "flex", "priority"]
TIER_PRIORITIES = {"flex": BATCH, "priority": PRIORITY_CLASSES["interactive"]}


def priority_of(value: str | int | None, tier: ServiceTier | None = None) -> int | None:
    """`priority` says it in Millrace's words, `service_tier` in OpenAI's; None if neither names a class."""
    if value is None:
        return TIER_PRIORITIES.get(tier or "")
    if tier in TIER_PRIORITIES:
        raise BadRequest("'priority' and 'service_tier' both set the priority; send one of them.", param="service_tier")
    if isinstance(value, str):
        return PRIORITY_CLASSES[value]
    check_range("priority", value, 0, len(CLASS_NAMES) - 1)
    return value
