"""The queue of requests that have no row. In order: the more urgent class first, then the tenant that was served least
for its weight, then the policy's place, then arrival.

A request counts as one class more urgent for each `aging_s` that it has waited, so no class starves another.
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
from millrace.plan.request import NUM_CLASSES, Request

Place = tuple[float, int]
"""The policy's place and, among equals, the ticket."""
QueueName = tuple[int, str]
"""Class and tenant."""
Comer = tuple[float, int]
"""Arrival and id."""


SPARE_ENTRIES = 1024
SOON_S = 10.0
"""Who comes now will meet those who grow more urgent within about so long."""


class WaitingQueue:
    def __init__(self, policy: Policy, shares: FairShares, aging_s: float) -> None:
        self._policy = policy
        self._shares = shares
        self._aging_s = aging_s
        self._queues: dict[QueueName, list[tuple[Place, Request]]] = {}
        self._by_id: dict[int, tuple[Place, Request]] = {}
        self._deadlines: list[tuple[float, int]] = []
        self._comers: list[deque[Comer]] = [deque() for _ in range(NUM_CLASSES)]
        """By class, in the order in which they were added; those that have left are dropped now and then."""
        self.num_by_class = [0] * NUM_CLASSES
        self.tokens_by_class = [0] * NUM_CLASSES
        """Tokens that the waiting requests have yet to compute, before anything is found in the cache."""

    def __len__(self) -> int:
        return len(self._by_id)

    def __contains__(self, request_id: int) -> bool:
        return request_id in self._by_id

    def add(self, request: Request) -> None:
        place = (self._policy.place(request), request.ticket)
        entry = (place, request)
        queue = self._queues.setdefault(_queue_of(request), [])
        if not queue or queue[-1][0] <= place:  # most come last
            queue.append(entry)
        else:
            insort(queue, entry, key=lambda entry: entry[0])
        self._by_id[request.id] = entry
        self._note_comer(request)
        self._count(request, 1)
        if request.deadline < math.inf:
            heapq.heappush(self._deadlines, (request.deadline, request.id))
            if len(self._deadlines) > 2 * len(self._by_id) + SPARE_ENTRIES:
                self._forget_deadlines()

    def _forget_deadlines(self) -> None:
        """Drop the entries of requests that no longer wait: most leave long before their deadline."""
        self._deadlines = [(request.deadline, key) for key, (_, request) in self._by_id.items()]
        self._deadlines = [entry for entry in self._deadlines if entry[0] < math.inf]
        heapq.heapify(self._deadlines)

    def remove(self, request_id: int) -> Request:
        place, request = self._by_id.pop(request_id)
        name = _queue_of(request)
        queue = self._queues[name]
        # Most are the first.
        del queue[0 if queue[0][1] is request else bisect_left(queue, place, key=lambda entry: entry[0])]
        if not queue:
            del self._queues[name]
        self._count(request, -1)
        return request

    def in_order(self, now: float) -> Iterator[Request]:
        """Every request in its order. The one yielded last may be removed before the next is asked for."""
        cursors = dict.fromkeys(self._queues, 0)
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
        def precedence(name: QueueName) -> tuple[int, float, Place]:
            place, request = self._queues[name][cursors[name]]
            return self._urgency(request, now), self._shares.served(request.tenant), place

        return min(cursors, key=precedence)

    def would_precede(self, request: Request, other: Request, now: float) -> bool:
        """Whether `request` goes before `other`, if both wait."""
        mine = self._urgency(request, now), self._policy.place(request)
        return mine < (self._urgency(other, now), self._policy.place(other))

    def _urgency(self, request: Request, now: float) -> int:
        if request.priority == 0 or self._aging_s <= 0:
            return request.priority
        return max(0, request.priority - int(max(0.0, now - request.arrival) / self._aging_s))

    def _note_comer(self, request: Request) -> None:
        comers = self._comers[request.priority]
        comers.append((request.arrival, request.id))
        if len(comers) > 2 * self.num_by_class[request.priority] + SPARE_ENTRIES:
            self._comers[request.priority] = deque(comer for comer in comers if comer[1] in self._by_id)

    def num_aged(self, now: float) -> tuple[int, ...]:
        """By class: those that count as more urgent than it, or soon will."""
        if self._aging_s <= 0:
            return (0,) * NUM_CLASSES
        latest = now + SOON_S - self._aging_s
        return tuple(self._num_before(comers, latest) for comers in self._comers)

    def _num_before(self, comers: deque[Comer], latest: float) -> int:
        while comers and comers[0][1] not in self._by_id:
            comers.popleft()
        oldest = itertools.takewhile(lambda comer: comer[0] <= latest, comers)
        return sum(request_id in self._by_id for _, request_id in oldest)

    def _count(self, request: Request, sign: int) -> None:
        self.num_by_class[request.priority] += sign
        self.tokens_by_class[request.priority] += sign * (len(request.history) // 4)

    def expired(self, now: float) -> list[int]:
        """Ids of waiting requests whose deadline has passed. Entries of requests no longer here are dropped."""
        ids = []
        while self._deadlines and self._deadlines[0][0] < now:
            _, request_id = heapq.heappop(self._deadlines)
            if request_id in self._by_id:
                ids.append(request_id)
        return ids


def _queue_of(request: Request) -> QueueName:
    return request.priority, request.tenant
