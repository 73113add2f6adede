"""Acceptance on held-out answers: how often each place is accepted when served, given that those before it were.

Greedy answers make this exact: a draft is accepted if it is the token that the target wrote next.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from millrace.training.answers import Answer
from millrace.training.batches import batches_of
from millrace.training.target import Batch
from millrace.training.tasks.task import Task

Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]


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
    right, known = (part.cpu().numpy() for part in task.correct(batch))
    has_token = np.logical_and.accumulate(known, axis=0)
    is_accepted = np.logical_and.accumulate(known & right, axis=0)
    starts = is_start(is_accepted.sum(axis=0), has_token[0])
    was_right = np.concatenate([np.ones_like(is_accepted[:1]), is_accepted[:-1]])
    reached, accepted = has_token & was_right & starts, is_accepted & starts
    return Acceptance(*(tuple(part.sum(axis=(1, 2)).tolist()) for part in (reached, accepted)))


def is_start(num_accepted: Ints, has_draft: Bools) -> Bools:
    """Where chains start when served, [B, T]: a step gives the accepted drafts and one token more, so places inside an
    accepted chain start none. Chains from every place would count those, where drafting is easy, again and again."""
    starts = np.zeros_like(has_draft)
    for row, places in enumerate(has_draft):
        at = int(places.argmax())
        while at < len(places) and places[at]:
            starts[row, at] = True
            at += int(num_accepted[row, at]) + 1
    return starts
