"""The interface of drafters on a CPU: what proposes tokens that a step verifies.

A drafter never decides what becomes output: a draft is accepted if it equals the token that the target model draws at
its place, so a drafter can make an answer faster or slower, but not different.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from millrace.plan.step import Admission, Int32s


@dataclass(frozen=True, slots=True)
class DraftAsk:
    """A row that may have drafts in this step."""

    row: int
    tokens: Int32s
    """All known tokens of the row, prompt included. A view: valid during the call."""
    num_prompt: int
    max_drafts: int
    """At least 1."""
    min_probability: float = 0.0
    """A draft less likely than this to be accepted costs more than it saves: the cost of a draft, in tokens."""
    max_trained: int | None = None
    """Drafts that a trained drafter may propose; None: `max_drafts`."""
    min_gain: float = 0.0
    """Drafts from text must promise this many accepted tokens beyond their cost: a trained drafter gives as many."""


@dataclass(frozen=True, slots=True)
class RowProgress:
    """What a step gave a row, told to the row's drafter whether or not it had drafts."""

    row: int
    tokens: Int32s
    """All known tokens of the row, those of this step included. A view: valid during the call."""
    num_new: int
    """Tokens that the step added."""
    num_drafts: int
    """Drafts of this drafter that the step verified."""
    num_accepted: int
    """How many of them were accepted."""


@dataclass(frozen=True, slots=True)
class RowTokens:
    """The tokens of a row that the target has computed, or computes in this step."""

    row: int
    tokens: Int32s
    """A view: valid during the call."""
    is_prompt: bool = True
    """False for a row that decodes."""


class DraftGuide(Protocol):
    """Knows the grammars of masked rows before their masks are computed. Called on the thread that runs the steps."""

    def guide(self, request_id: int, ask: DraftAsk, drafts: Int32s) -> tuple[Int32s, bool]:
        """The first of the drafts, as far as the grammar allows them after the ask's tokens. Where the grammar forces
        other tokens: those, at most `ask.max_drafts`, and True."""
        ...


class Drafter(Protocol):
    """Called in step order, on the thread that runs the steps. Only `propose` must be written."""

    needs_hidden: bool = False
    """True if `take_hidden` or `take_states` needs the states of every step: no step may run without giving them."""

    def admit(self, admission: Admission) -> None:
        """A request gets a row; whatever was known about the row before is void. Happens again for the same request
        after a preemption or a failed step."""
        return

    def release(self, row: int, tokens: Int32s, *, has_ended: bool) -> None:
        """A request leaves its row. `tokens`: all it has; `has_ended`: False if it will be admitted again."""
        return

    def propose(self, asks: Sequence[DraftAsk]) -> list[Int32s]:
        """Up to `max_drafts` tokens for each row, in order: those expected to follow its known tokens."""
        ...

    def confirm(self, rows: Sequence[RowProgress]) -> None:
        """A step gave tokens to these rows."""
        return

    def take_hidden(self, hidden: Tensor, rows: Int32s, positions: Int32s) -> None:
        """`hidden` [n, hidden size]: the states that a step draws from, before its tokens are known. `rows`: the table
        row of each; `positions`: that of the token to be drawn from it. States of rejected drafts are among them."""
        return

    def feed(self, rows: Sequence[RowTokens]) -> None:
        """All rows of a step, after the target's forward pass."""
        return

    def leave(self, rows: Sequence[RowTokens]) -> None:
        """These rows end or are preempted. Their blocks are still theirs during the call."""
        return

    def take_states(self, rows: Int32s, starts: Int32s, counts: Int32s, states: Tensor) -> None:
        """`states` [tokens, width]: what a feature drafter reads of the target, for all tokens of a step: `counts` of
        each table row, from position `starts` on."""
        return
