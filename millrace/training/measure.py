"""Acceptance on held-out answers: how often each drafted place would be accepted, given that those before it were.

Greedy answers make this exact: a draft is accepted if it is the token that the target wrote next.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from millrace.training.answers import Answer
from millrace.training.batches import batches_of
from millrace.training.target import Batch
from millrace.training.tasks.task import Task


@dataclass(frozen=True, slots=True)
class Acceptance:
    """Of one workload."""

    reached: tuple[int, ...]
    """Chains whose drafts before this place were all accepted."""
    accepted: tuple[int, ...]

    @property
    def rates(self) -> tuple[float, ...]:
        """Per place the share of drafts accepted among those whose predecessors were."""
        pairs = zip(self.accepted, self.reached, strict=True)
        return tuple(accepted / reached if reached else 0.0 for accepted, reached in pairs)

    def tokens_per_step(self, num_drafts: int) -> float:
        """Expected tokens of a step that verifies this many drafts, the target's own token included."""
        total, chance = 1.0, 1.0
        for rate in self.rates[:num_drafts]:
            chance *= rate
            total += chance
        return total

    def __add__(self, other: Acceptance) -> Acceptance:
        return Acceptance(
            tuple(map(sum, zip(self.reached, other.reached, strict=True))),
            tuple(map(sum, zip(self.accepted, other.accepted, strict=True))),
        )


def measure(task: Task, answers: Sequence[Answer], batch_tokens: int, device: torch.device) -> dict[str, Acceptance]:
    """Acceptance by workload."""
    found: dict[str, Acceptance] = {}
    for workload in sorted({answer.workload for answer in answers}):
        own = [answer for answer in answers if answer.workload == workload]
        parts = [_of_batch(task, batch) for batch in batches_of(own, batch_tokens, device)]
        total = parts[0]
        for part in parts[1:]:
            total = total + part
        found[workload] = total
    return found


def overall(by_workload: Mapping[str, Acceptance]) -> Acceptance:
    values = list(by_workload.values())
    total = values[0]
    for value in values[1:]:
        total = total + value
    return total


def _of_batch(task: Task, batch: Batch) -> Acceptance:
    right, known = task.correct(batch)
    alive = torch.ones_like(right[0])
    reached, accepted = [], []
    for own, has_token in zip(right, known, strict=True):
        alive = alive & has_token
        reached.append(int(alive.sum()))
        alive = alive & own
        accepted.append(int(alive.sum()))
    return Acceptance(tuple(reached), tuple(accepted))
