"""The queue of requests that have no row: ordered by rank, searchable by id, with the nearest deadline at hand."""

from __future__ import annotations

import heapq
import math
from bisect import bisect_left, insort
from collections.abc import Iterator

from millrace.plan.request import Request


class Waiting:
    def __init__(self) -> None:
        self._queue: list[tuple[int, int, Request]] = []
        self._by_id: dict[int, Request] = {}
        self._deadlines: list[tuple[float, int]] = []

    def __len__(self) -> int:
        return len(self._queue)

    def __iter__(self) -> Iterator[Request]:
        """In order. The queue may be changed while iterating only by stopping the iteration."""
        return (entry[2] for entry in self._queue)

    def __contains__(self, request_id: int) -> bool:
        return request_id in self._by_id

    def add(self, request: Request) -> None:
        insort(self._queue, (request.rank, request.ticket, request), key=lambda entry: entry[:2])
        self._by_id[request.id] = request
        if request.deadline < math.inf:
            heapq.heappush(self._deadlines, (request.deadline, request.id))

    def remove(self, request_id: int) -> Request:
        request = self._by_id.pop(request_id)
        index = bisect_left(self._queue, (request.rank, request.ticket), key=lambda entry: entry[:2])
        del self._queue[index]
        return request

    def expired(self, now: float) -> list[int]:
        """Ids of waiting requests whose deadline has passed. Entries of requests no longer here are dropped."""
        ids = []
        while self._deadlines and self._deadlines[0][0] < now:
            _, request_id = heapq.heappop(self._deadlines)
            if request_id in self._by_id:
                ids.append(request_id)
        return ids

    def next_deadline(self) -> float:
        while self._deadlines and self._deadlines[0][1] not in self._by_id:
            heapq.heappop(self._deadlines)
        return self._deadlines[0][0] if self._deadlines else math.inf
