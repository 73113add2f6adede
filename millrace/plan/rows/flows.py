"""Flows: the running requests of one holder of a fair share and of one class. They share steps by weight."""

from __future__ import annotations

from dataclasses import dataclass

from millrace.plan.request import Request

CLASS_WEIGHTS = (4.0, 2.0, 1.0)
"""How a holder's share is divided between its classes, the most urgent first."""
FlowName = tuple[str, int]
"""Holder of a share (a tenant, or an adapter) and class."""


@dataclass(slots=True)
class _Flow:
    name: FlowName
    weight: float = 1.0
    """The holder's."""
    num_rows: int = 0


class Flows:
    def __init__(self) -> None:
        self._index: dict[FlowName, int] = {}
        self._flows: list[_Flow] = []
        self._free: list[int] = []

    @property
    def num_open(self) -> int:
        return len(self._index)

    def enter(self, request: Request) -> int:
        """A request got a row. Returns the number of its flow, which lasts as long as the flow has rows."""
        name = (request.holder, request.priority)
        at = self._index.get(name)
        if at is None:
            at = self._index[name] = self._free.pop() if self._free else len(self._flows)
            self._flows[at : at + 1] = [_Flow(name)]
        flow = self._flows[at]
        flow.weight = request.weight
        flow.num_rows += 1
        return at

    def leave(self, at: int) -> None:
        flow = self._flows[at]
        flow.num_rows -= 1
        if flow.num_rows == 0:
            del self._index[flow.name]
            self._free.append(at)

    def has_any(self, request: Request, numbers: list[int]) -> bool:
        """True if the request belongs to one of these flows."""
        return self._index.get((request.holder, request.priority), -1) in numbers

    def weights(self, numbers: list[int]) -> list[float]:
        """Weights of these flows. A holder's weight is divided between those of its classes that are among them."""
        flows = [self._flows[at] for at in numbers]
        of_holder: dict[str, float] = {}
        for holder, priority in (flow.name for flow in flows):
            of_holder[holder] = of_holder.get(holder, 0.0) + CLASS_WEIGHTS[priority]
        return [flow.weight * CLASS_WEIGHTS[flow.name[1]] / of_holder[flow.name[0]] for flow in flows]
