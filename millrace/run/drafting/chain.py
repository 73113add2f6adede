"""Drafts from a model, one after the other: a draft model, or a feature drafter that reads the target's states.

The model's keys and values are further layers of the target's blocks: a block holds those of both for the same tokens.
So prefix hits, preemption, host memory and freeing need nothing of their own here. One column says how many tokens of
each row the drafter has computed; it catches up, and then drafts in a chain. It draws with the noise of the target (the
row's seed, and the position), so that both draw the same token wherever their distributions are alike.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from millrace.plan.step import Admission, Int32s, Int64s
from millrace.run.drafting.drafter import DraftAsk, Drafter, RowProgress, RowTokens


@dataclass(frozen=True, slots=True)
class DraftInputs:
    """Tokens that a drafter computes: `counts` of each table row, from position `starts` on."""

    rows: Int32s
    starts: Int32s
    counts: Int32s
    tokens: Int32s
    """Row after row."""
    states: Tensor | None
    """[tokens, hidden], for feature drafters: the target's state one position before each token."""


@dataclass(frozen=True, slots=True)
class PassStates:
    """The drafter's states of the last token of each row."""

    for_head: Tensor
    """What tokens are drawn from."""
    hidden: Tensor | None
    """Of feature drafters: takes the place of the target's state in the next link of the chain."""


class DraftPass(Protocol):
    """Runs a drafter on its own KV tensors, with the block tables of the target."""

    no_states: Tensor | None
    """[0, hidden]: fused states of no token; None for a draft model."""

    def fuse(self, states: Tensor) -> Tensor:
        """What a feature drafter keeps of the target's states [n, width]: [n, hidden]."""
        ...

    def forward(self, inputs: DraftInputs) -> PassStates: ...

    def write(self, inputs: DraftInputs) -> None:
        """`forward`, of which only the keys and values are needed."""
        ...

    def draw(self, states: PassStates, rows: Int32s, positions: Int32s) -> Int32s:
        """A token for each state, drawn as the target draws for this row at this position."""
        ...


class ChainDrafter(Drafter):
    def __init__(self, run: DraftPass, *, max_rows: int, block_size: int, vocab_size: int, max_context: int) -> None:
        """`vocab_size`: of the target. `max_context`: tokens of a row beyond which there are no drafts."""
        self._run = run
        self._block_size = block_size
        self._vocab_size = vocab_size
        self._max_context = max_context
        self._computed = np.zeros(max_rows, np.int64)
        """Tokens of each row whose keys and values the drafter has written."""
        self.needs_hidden = run.no_states is not None
        self._states = None if run.no_states is None else _RowStates(max_rows, run.no_states)

    def admit(self, admission: Admission) -> None:
        self._computed[admission.row] = admission.num_computed
        if self._states is not None:
            self._states.clear(admission.row)

    def take_states(self, rows: Int32s, starts: Int32s, counts: Int32s, states: Tensor) -> None:
        """The target's states of all tokens of a step, row after row."""
        if self._states is not None:
            self._states.take(rows, starts, counts, self._run.fuse(states))

    def feed(self, rows: Sequence[RowTokens]) -> None:
        """Rows that compute tokens in this step: prompts are fed in the same steps as to the target. Rows that decode
        are fed when they draft, or when a block's worth has gathered."""
        self._write([own for own in rows if own.is_prompt or self._lag(own) > self._block_size])

    def leave(self, rows: Sequence[RowTokens]) -> None:
        """These rows end here. Blocks that the target has filled may stay in the prefix cache: fill them too."""
        size = self._block_size
        self._write([own for own in rows if len(own.tokens) // size * size > self._computed[own.row]])

    def propose(self, asks: Sequence[DraftAsk]) -> list[Int32s]:
        limits = np.array([min(ask.max_drafts, self._max_context - len(ask.tokens)) for ask in asks], np.int64)
        drafts = [np.zeros(max(0, limit), np.int32) for limit in limits.tolist()]
        due: Int64s = np.flatnonzero(limits > 0)
        states = self._catch_up([RowTokens(asks[at].row, asks[at].tokens) for at in due.tolist()])
        if states is None:
            return drafts
        rows = np.array([asks[at].row for at in due.tolist()], np.int32)
        positions = np.array([len(asks[at].tokens) for at in due.tolist()], np.int32)
        for place in range(int(limits.max())):
            drawn = self._run.draw(states, rows, positions)
            for at, token in zip(due.tolist(), drawn.tolist(), strict=True):
                drafts[at][place] = token
            keeps = limits[due] > place + 1
            due, rows, positions = due[keeps], rows[keeps], positions[keeps] + np.int32(1)
            if len(due):
                states = self._link(_kept(states, keeps), rows, positions - np.int32(1), drawn[keeps])
        return [self._known_to_target(own) for own in drafts]

    def confirm(self, rows: Sequence[RowProgress]) -> None:
        """What follows a rejected draft must be computed again; and by a feature drafter everything that it computed
        from its own guesses of the target's states, now that the true ones are known."""
        for progress in rows:
            # A draft model has computed its own drafts, and so all but the last token at most.
            has_own = self._states is None and progress.num_drafts
            num_void = 1 if has_own else progress.num_new
            valid = len(progress.tokens) - num_void
            self._computed[progress.row] = min(int(self._computed[progress.row]), valid)

    def _link(self, states: PassStates, rows: Int32s, starts: Int32s, tokens: Int32s) -> PassStates:
        """Compute the last drafts."""
        ones = np.ones(len(rows), np.int32)
        self._computed[rows] = starts + 1
        return self._run.forward(DraftInputs(rows, starts, ones, tokens, states.hidden))

    def _lag(self, own: RowTokens) -> int:
        return len(own.tokens) - int(self._computed[own.row])

    def _catch_up(self, own: Sequence[RowTokens]) -> PassStates | None:
        """Compute what the drafter lacks of these rows; None if nothing."""
        inputs = self._lacking(own)
        return None if inputs is None else self._run.forward(inputs)

    def _write(self, own: Sequence[RowTokens]) -> None:
        """The same, if no drafts follow."""
        inputs = self._lacking(own)
        if inputs is not None:
            self._run.write(inputs)

    def _lacking(self, own: Sequence[RowTokens]) -> DraftInputs | None:
        own = [each for each in own if self._lag(each) > 0]
        if not own:
            return None
        rows = np.array([each.row for each in own], np.int32)
        starts = self._computed[rows].astype(np.int32)
        parts = [each.tokens[start:] for each, start in zip(own, starts.tolist(), strict=True)]
        counts = np.array([len(part) for part in parts], np.int32)
        before = None if self._states is None else self._states.before(rows, starts, counts)
        self._computed[rows] = starts + counts
        return DraftInputs(rows, starts, counts, np.concatenate(parts), before)

    def _known_to_target(self, drafts: Int32s) -> Int32s:
        """The drafts before the first one that is padding of the drafter's vocabulary."""
        outside = np.flatnonzero(drafts >= self._vocab_size)
        return drafts[: int(outside[0])] if len(outside) else drafts


class _RowStates:
    """The target's states that the drafter has not used yet, by row."""

    def __init__(self, max_rows: int, none: Tensor) -> None:
        self._none = none
        self._first = np.zeros(max_rows, np.int64)
        """Position of the first state kept."""
        self._kept = [none] * max_rows

    def clear(self, row: int) -> None:
        self._kept[row] = self._none

    def take(self, rows: Int32s, starts: Int32s, counts: Int32s, states: Tensor) -> None:
        parts = torch.split(states, counts.tolist())
        for row, start, own in zip(rows.tolist(), starts.tolist(), parts, strict=True):
            kept, first = self._kept[row], int(self._first[row])
            if not first <= start <= first + len(kept):
                kept, first = self._none, start
            # What was kept from `start` on belonged to rejected drafts.
            self._kept[row], self._first[row] = torch.cat([kept[: start - first], own]), first

    def before(self, rows: Int32s, starts: Int32s, counts: Int32s) -> Tensor:
        """States one position before each token. Zeros before the first token, and for the token after a prefix hit:
        the target does not compute the state before it again."""
        parts = []
        for row, start, count in zip(rows.tolist(), starts.tolist(), counts.tolist(), strict=True):
            kept, first = self._kept[row], int(self._first[row])
            skipped = max(0, start - 1 - first)
            own = kept[skipped : skipped + min(count, max(0, start - 1 + count - first))]
            parts += [own.new_zeros((count - len(own), own.shape[1])), own]
            # The state of the last token is needed for the one after it.
            self._kept[row], self._first[row] = kept[skipped + len(own) :].clone(), start - 1 + count
        return torch.cat(parts)


def _kept(states: PassStates, keeps: np.ndarray[tuple[int], np.dtype[np.bool_]]) -> PassStates:
    if keeps.all():
        return states
    index = torch.from_numpy(keeps).to(states.for_head.device)
    return PassStates(states.for_head[index], None if states.hidden is None else states.hidden[index])
