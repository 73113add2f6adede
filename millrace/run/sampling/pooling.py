"""Pooled hidden states, for rows whose result is a vector: that of the prompt's last token, or the sum over all."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from torch import Tensor

from millrace.plan.step import Int32s
from millrace.run.table.batch import StepRows
from millrace.run.table.request_table import RequestTable


@dataclass(frozen=True, slots=True)
class PooledPart:
    """What one step adds to the vector of a request. A part from the first token on begins it anew."""

    request_id: int
    first: int
    """Position of the part's first token."""
    vector: Tensor
    """float32 [hidden]; of an encoder, what its head gives."""
    is_finished: bool = False
    """True if it is the result as it stands. False: a sum, which is made a vector of length 1."""

    def to_host(self) -> PooledPart:
        return replace(self, vector=self.vector.to("cpu", non_blocking=True))


def pool_states(step: StepRows, query_starts: Int32s, table: RequestTable, hidden: Tensor) -> tuple[PooledPart, ...]:
    """`hidden`: the states of all tokens of the step, after the final norm."""
    if step.pooled is None:
        return ()
    parts = []
    for index in np.flatnonzero(step.pooled).tolist():
        row, start, first = int(step.rows[index]), int(step.starts[index]), int(query_starts[index])
        num_prompt = int(table.num_prompt[row])
        end = min(start + int(step.counts[index]), num_prompt)
        own, request_id = hidden[first : first + end - start], int(table.request_ids[row])
        if table.params[row].params.pooling == "mean":
            parts.append(PooledPart(request_id, start, own.float().sum(dim=0)))
        elif end == num_prompt:
            parts.append(PooledPart(request_id, 0, own[-1].float()))
    return tuple(parts)
