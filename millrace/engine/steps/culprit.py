"""The search for the request that makes a step fail."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Culprit:
    """The request whose step fails on its own, and how."""

    request_id: int
    error: Exception


def find_culprit(
    suspects: Sequence[int], try_rows: Callable[[Sequence[int]], Exception | None]
) -> tuple[int, Exception] | None:
    """Run the rows in halves until a single one fails. `try_rows` runs a step of some of them and returns its error."""
    while suspects:
        half = suspects[: max(1, len(suspects) // 2)]
        failure = try_rows(half)
        if failure is None:
            suspects = suspects[len(half) :]
        elif len(half) == 1:
            return half[0], failure
        else:
            suspects = half
    return None
