"""Batches of whole sequences, bounded by their padded number of tokens."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence

import torch

from millrace.training.answers import Answer
from millrace.training.target import Batch

_SORTED_TOGETHER = 512
"""Sequences that are sorted by length before they are cut into batches: less padding, order still mostly random."""


def plan_batches(lengths: Sequence[int], batch_tokens: int, seed: int | None = None) -> list[list[int]]:
    """Indices of the sequences of each batch. With a seed, shuffled; a longer sequence is a batch of its own."""
    order = list(range(len(lengths)))
    draw = random.Random(seed)
    if seed is not None:
        draw.shuffle(order)
    found: list[list[int]] = []
    for first in range(0, len(order), _SORTED_TOGETHER):
        own = sorted(order[first : first + _SORTED_TOGETHER], key=lambda index: lengths[index])
        current: list[int] = []
        for index in own:
            if current and (len(current) + 1) * lengths[index] > batch_tokens:
                found.append(current)
                current = []
            current.append(index)
        found.append(current)
    if seed is not None:
        draw.shuffle(found)
    return found


def batches_of(answers: Sequence[Answer], batch_tokens: int, device: torch.device) -> Iterator[Batch]:
    for indices in plan_batches([len(answer.token_ids) for answer in answers], batch_tokens):
        yield make_batch([answers[index] for index in indices], device)


def make_batch(answers: Sequence[Answer], device: torch.device) -> Batch:
    return Batch.of([(answer.token_ids, answer.num_prompt) for answer in answers], device)
