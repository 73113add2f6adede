"""Where the recurrent states of a step's rows are.

A state tensor is [table rows, places, ...]. The state of a row after n tokens is at place n % places, so the place that
a step reads follows from where it begins, and a step that verifies drafts leaves a state after each of its tokens: the
number of accepted ones selects which is read next. Places are as many as a row may have tokens that draw in one step.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class StateRows:
    """Ragged rows, as in `ops/attention/rows.py`."""

    query_starts: Tensor
    """int32 [n + 1]: the tokens of row i are query_starts[i] : query_starts[i + 1]."""
    starts: Tensor
    """int32 [n]: position of each row's first token. A row that starts at 0 has no state yet."""
    table_rows: Tensor
    """int32 [n]: the rows of the state tensors."""


def kept_from(start: int, count: int, num_places: int) -> int:
    """The first of the row's tokens, by its index in the step, after which the state is kept: the last `num_places`."""
    return max(0, count - num_places)
