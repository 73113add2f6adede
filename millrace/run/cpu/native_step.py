"""A whole CPU step in one C++ call, for steps without log-probabilities, biases or penalties."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from millrace.models.native_stack import KINDS, NativeStack, WholeStep
from millrace.plan.step import StepPlan
from millrace.run.table.inputs import host_tokens
from millrace.run.table.request_table import RequestTable

if TYPE_CHECKING:
    from millrace.run.sampling.sampler import Sampler


class NativeStep:
    """Constant addresses are written once; each step's columns are copied into one array."""

    def __init__(
        self, stack: NativeStack, kv: Sequence[Tensor], table: RequestTable, sampler: Sampler, *, max_rows: int
    ) -> None:
        self._stack, self._kv, self._table, self._sampler = stack, kv, table, sampler
        self._columns = np.zeros((3, max_rows), np.int32)
        self._samples = np.zeros(max_rows, np.uint8)
        self.nanoseconds: Tensor | None = None
        """int64, one entry per native_stack.KINDS: if set, the time of each kind of work is added here."""
        rows, starts, counts = (part.ctypes.data for part in self._columns)
        self._step = WholeStep(
            rows=rows,
            starts=starts,
            counts=counts,
            samples=self._samples.ctypes.data,
            tables=table.block_tables.data_ptr(),
            table_stride=table.block_tables.shape[1],
            prompts=table.num_prompt.ctypes.data,
            last_tokens=table.last_tokens.data_ptr(),
            temperature=sampler.temperature.ctypes.data,
            top_p=sampler.top_p.ctypes.data,
            min_p=sampler.min_p.ctypes.data,
            top_k=sampler.top_k.ctypes.data,
            seeds=sampler.seed.ctypes.data,
        )

    def can_run(self, plan: StepPlan) -> bool:
        rows = plan.rows
        return not (self._sampler.is_special[rows] | (self._table.num_prompt_logprobs[rows] >= 0)).any()

    def __call__(self, plan: StepPlan) -> Tensor:
        """int64: the drawn tokens, in plan order."""
        num_rows, columns, step = len(plan.rows), self._columns, self._step
        columns[0, :num_rows], columns[1, :num_rows], columns[2, :num_rows] = plan.rows, plan.starts, plan.counts
        self._samples[:num_rows] = plan.samples
        tokens = None
        if (plan.starts < self._table.num_admitted[plan.rows]).any():
            query_starts = np.zeros(num_rows + 1, np.int32)
            np.cumsum(plan.counts, out=query_starts[1:])
            tokens = host_tokens(plan, self._table, query_starts)
        drawn = torch.empty(int(plan.samples.sum()), dtype=torch.int64)
        step.num_rows = num_rows
        step.tokens = None if tokens is None else tokens.ctypes.data
        step.drawn = drawn.data_ptr()
        step.nanoseconds = None if self.nanoseconds is None else self.nanoseconds.data_ptr()
        self._stack.step(step, int((plan.starts + plan.counts).max()), self._kv)
        return drawn

    def measure(self) -> Tensor:
        """Start timing each kind of work; returns the counters, in nanoseconds."""
        self.nanoseconds = torch.zeros(len(KINDS), dtype=torch.int64)
        return self.nanoseconds
