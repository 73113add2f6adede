"""Checks of numbers and lists that a caller sends."""

from __future__ import annotations

from millrace.errors import BadRequest


def in_range(name: str, value: float | None, low: float, high: float) -> None:
    if value is None:
        return
    # The comparison is false for NaN, and exact for integers too large for a float.
    if not low <= value <= high:
        raise BadRequest(f"{name} is {value}; it must be between {low} and {high}.", param=name)


def at_most(name: str, count: int, limit: int) -> None:
    if count > limit:
        raise BadRequest(f"{name} has {count} entries; at most {limit} are allowed.", param=name)
