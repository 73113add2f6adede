"""The rows of an encoder's steps in flight."""

from __future__ import annotations

import numpy as np

from millrace.plan.request import Request
from millrace.plan.step import Bools, Int32s, Int64s


class EncodeRows:
    """`RunningRows`: the texts of steps in flight."""

    num_constrained = 0

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.active: Bools = np.zeros(capacity, np.bool_)
        self.request_ids: Int64s = np.full(capacity, -1, np.int64)
        self.priority: Int32s = np.zeros(capacity, np.int32)
        self.classes: set[int] = set()
        self.requests: dict[int, Request] = {}
        """By row; rows that wait for the end of a step have none."""
        self.row_of: dict[int, int] = {}
        self.free = list(range(capacity - 1, -1, -1))

    def take(self, request: Request) -> int:
        row = self.free.pop()
        self.active[row], self.request_ids[row], self.priority[row] = True, request.id, request.priority
        self.classes.add(request.priority)
        self.requests[row], self.row_of[request.id] = request, row
        return row

    def release(self, row: int) -> Request:
        """The row is free only when `free` has it again."""
        request = self.requests.pop(row)
        del self.row_of[request.id]
        self.active[row] = False
        return request
