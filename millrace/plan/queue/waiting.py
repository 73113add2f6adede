"""The waiting queue. Order: priority class, then its share's virtual time, then the policy's sort key, then
arrival.

A request is promoted by one class for each `aging_s` seconds of waiting, so no class starves another.
"""

from __future__ import annotations

import heapq
import itertools
import math
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Iterator

from millrace.plan.queue.fair_shares import FairShares
from millrace.plan.queue.policy import Policy
from millrace.plan.queue.waiting_tokens import CountedTokens
from millrace.plan.request import NUM_CLASSES, Request

SortKey = tuple[float, int]
"""The policy's sort key and, among equals, the ticket."""
QueueName = tuple[int, str]
"""Class and holder of the share."""
Arrival = tuple[float, int]
"""Arrival time and request id."""

MAX_STALE_ENTRIES = 1024
"""Entries of requests that have left, beyond which a list is rebuilt."""
AGING_WINDOW_S = 10.0
"""Waiting requests that age within this window count as aged for a request that arrives now."""


class WaitingQueue:
    def __init__(self, policy: Policy, shares: FairShares, aging_s: float, tokens: CountedTokens) -> None:
        self._policy = policy
        self._shares = shares
        self._aging_s = aging_s
        self._queues: dict[QueueName, list[tuple[SortKey, Request]]] = {}
        self._by_id: dict[int, tuple[SortKey, Request]] = {}
        self._deadlines: list[tuple[float, int]] = []
        self._arrivals: list[deque[Arrival]] = [deque() for _ in range(NUM_CLASSES)]
        """By class, in the order added. May contain requests that have left."""
        self.num_by_class = [0] * NUM_CLASSES
        self.tokens = tokens

    def __len__(self) -> int:
        return len(self._by_id)

    def __contains__(self, request_id: int) -> bool:
        return request_id in self._by_id

    def add(self, request: Request) -> None:
        key = (self._policy.sort_key(request), request.ticket)
        entry = (key, request)
        queue = self._queues.setdefault(_queue_of(request), [])
        if not queue or queue[-1][0] <= key:  # Most requests go last.
            queue.append(entry)
        else:
            insort(queue, entry, key=lambda entry: entry[0])
        self._by_id[request.id] = entry
        self._note_arrival(request)
        self.num_by_class[request.priority] += 1
        self.tokens.add(request)
        if request.deadline < math.inf:
            heapq.heappush(self._deadlines, (request.deadline, request.id))
            if len(self._deadlines) > 2 * len(self._by_id) + MAX_STALE_ENTRIES:
                self._rebuild_deadlines()

    def _rebuild_deadlines(self) -> None:
        """Drop entries of requests that have left: most leave long before their deadline."""
        self._deadlines = [(request.deadline, request_id) for request_id, (_, request) in self._by_id.items()]
        self._deadlines = [entry for entry in self._deadlines if entry[0] < math.inf]
        heapq.heapify(self._deadlines)

    def remove(self, request_id: int) -> Request:
        key, request = self._by_id.pop(request_id)
        name = _queue_of(request)
        queue = self._queues[name]
        is_first = queue[0][1] is request  # The usual case.
        del queue[0 if is_first else bisect_left(queue, key, key=lambda entry: entry[0])]
        if not queue:
            del self._queues[name]
        self.num_by_class[request.priority] -= 1
        self.tokens.remove(request)
        return request

    def in_order(self, now: float, least_urgent: int = NUM_CLASSES - 1) -> Iterator[Request]:
        """The requests of this class and more urgent ones, in queue order. The caller may remove the last one yielded
        before it continues."""
        cursors = {name: 0 for name in self._queues if name[0] <= least_urgent}
        while cursors:
            name = self._first(cursors, now) if len(cursors) > 1 else next(iter(cursors))
            queue = self._queues[name]
            request = queue[cursors[name]][1]
            yield request
            if request.id in self._by_id:
                cursors[name] += 1
            if cursors[name] >= len(queue):
                del cursors[name]

    def _first(self, cursors: dict[QueueName, int], now: float) -> QueueName:
        def precedence(name: QueueName) -> tuple[int, float, SortKey]:
            key, request = self._queues[name][cursors[name]]
            return self._urgency(request, now), self._shares.virtual_time(request.holder), key

        return min(cursors, key=precedence)

    def would_precede(self, request: Request, other: Request, now: float) -> bool:
        """True if `request` would go before `other` if both waited."""
        mine = self._urgency(request, now), self._policy.sort_key(request)
        return mine < (self._urgency(other, now), self._policy.sort_key(other))

    def _urgency(self, request: Request, now: float) -> int:
        """The class after aging; 0 is the most urgent."""
        if request.priority == 0 or self._aging_s <= 0:
            return request.priority
        return max(0, request.priority - int(max(0.0, now - request.arrival) / self._aging_s))

    def _note_arrival(self, request: Request) -> None:
        arrivals = self._arrivals[request.priority]
        arrivals.append((request.arrival, request.id))
        if len(arrivals) > 2 * self.num_by_class[request.priority] + MAX_STALE_ENTRIES:
            self._arrivals[request.priority] = deque(arrival for arrival in arrivals if arrival[1] in self._by_id)

    def num_aged(self, now: float) -> tuple[int, ...]:
        """Number of requests by class that aging has promoted, or will within `AGING_WINDOW_S`."""
        if self._aging_s <= 0:
            return (0,) * NUM_CLASSES
        latest = now + AGING_WINDOW_S - self._aging_s
        return tuple(self._num_before(arrivals, latest) for arrivals in self._arrivals)

    def _num_before(self, arrivals: deque[Arrival], latest: float) -> int:
        while arrivals and arrivals[0][1] not in self._by_id:
            arrivals.popleft()
        oldest = itertools.takewhile(lambda arrival: arrival[0] <= latest, arrivals)
        return sum(request_id in self._by_id for _, request_id in oldest)

    def expired(self, now: float) -> list[int]:
        """Ids of waiting requests whose deadline has passed. Drops their entries."""
        ids = []
        while self._deadlines and self._deadlines[0][0] < now:
            _, request_id = heapq.heappop(self._deadlines)
            if request_id in self._by_id:
                ids.append(request_id)
        return ids


def _queue_of(request: Request) -> QueueName:
    return request.priority, request.holder
