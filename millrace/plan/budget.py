"""How many tokens a step may compute, and how they are cut into chunks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from millrace.plan.pacing.step_time import StepRates, StepTimeModel
from millrace.plan.pacing.yielding import YieldingTime
from millrace.plan.request import BATCH
from millrace.plan.rows.rows import Rows
from millrace.plan.seating import Seating
from millrace.plan.step import Int64s, StepPlan

MANY_PREFILLS, MANY_PREFILLS_SHARE = 8, 1 / 8
"""With at least this many requests waiting for their first token, and more than this many per decoding row, steps use
the full token budget and may be longer: short steps would delay more requests than they keep smooth."""
MANY_PREFILLS_STRETCH = 4
"""How much longer such a step may be than others."""
PREFILL_STRETCH = 8
"""The same for a step in which no row decodes: only requests that arrive wait for its end."""
RESERVED_SHARE = 1 / 4
"""Chunks get this share of a step's time, however long its decode rows take: prefill always advances."""
MIN_CHUNK = 16
"""Tokens that chunks get in any step."""
EFFICIENT_CHUNK = 128
"""The same in a step in which no row decodes: no stream's pace is to be kept, and shorter chunks spend much of a step
on reading weights. Longer ones would delay cancellations and arrivals for little."""


@dataclass(frozen=True, slots=True)
class StepTarget:
    """How long a step with decoding rows should take at most, and what is known of the device's speed."""

    step_s: float
    rates: StepRates
    uncertainty: float = 1.0
    first_chunk: int = 0
    """Prompt tokens beside decode rows are at most so many, or twice as many as a measured step had: the rates of a
    device of which nothing is known may be far off. 0: no such limit."""


@dataclass(slots=True)
class ChunkBudget:
    """Tokens that the chunks of a step may still take."""

    tokens: int
    yielding: int
    """How many of them may go to classes less urgent than `urgent`."""
    urgent: int = BATCH
    """The most urgent class that decodes in the step."""

    def left(self, priority: int) -> int:
        """For a request of this class."""
        return self.tokens if priority <= self.urgent else min(self.tokens, self.yielding)

    def take(self, priority: int, count: int) -> None:
        self.tokens -= count
        if priority > self.urgent:
            self.yielding -= count


class StepBudget:
    def __init__(self, token_budget: int, mixed_budget: int, target: StepTarget | None = None) -> None:
        """`target`: None if only tokens limit a step."""
        self.token_budget = token_budget
        self.mixed_budget = min(mixed_budget or token_budget, token_budget)
        self._has_mixed_budget = self.mixed_budget < token_budget
        self.step_s = target.step_s if target is not None else 0.0
        self._first_chunk = target.first_chunk if target is not None else 0
        self.times = StepTimeModel(target.rates, target.uncertainty) if target is not None else None
        self._yielding: YieldingTime | None = None
        """None if no prompt yields."""
        self._all_yield = False
        """True if there are no other prompts, so that a step's chunks are theirs."""

    def for_chunks(self, rows: Rows, singles: Int64s, behind: Int64s, waiting: Sequence[int]) -> ChunkBudget:
        """Tokens for chunks, in a step that also gives one token to each of the rows `singles`. `behind`: rows with
        more to compute. `waiting`: number of requests without a row, by class."""
        if len(behind) + sum(waiting) == 0:
            return ChunkBudget(0, 0)
        times, num_singles = self.times, len(singles)
        urgent = rows.most_urgent(singles) if times is not None and num_singles else BATCH
        num_without_token = sum(waiting[: urgent + 1])
        if len(behind):
            has_no_token = rows.known_host[behind] == rows.num_prompt[behind]
            num_without_token += int((has_no_token & (rows.priority[behind] <= urgent)).sum())
        is_many = num_without_token >= MANY_PREFILLS and num_without_token > MANY_PREFILLS_SHARE * num_singles
        tokens = self._by_tokens(num_singles, is_many)
        if times is None:
            return ChunkBudget(tokens, tokens)
        decode_s = times.decode_s(num_singles, int(rows.known[singles].sum()) if num_singles else 0)
        if num_singles == 0:
            limit_s, least = PREFILL_STRETCH * self.step_s, EFFICIENT_CHUNK
        else:
            limit_s, least = (MANY_PREFILLS_STRETCH if is_many else 1) * self.step_s / times.pace, MIN_CHUNK
        chunk_s = max(limit_s - decode_s, RESERVED_SHARE * max(limit_s, decode_s))
        tokens = min(tokens, max(self._in_time(times, chunk_s, rows, singles, behind), least))
        if not (sum(waiting[urgent + 1 :]) or (len(behind) and rows.priority[behind].max() > urgent)):
            self._yielding = None
            return ChunkBudget(tokens, tokens)
        self._yielding = self._yielding or YieldingTime()
        self._all_yield = sum(waiting[: urgent + 1]) == 0 and not (rows.priority[behind] <= urgent).any()
        yielding = self._yielding.take(decode_s, lambda time_s: self._in_time(times, time_s, rows, singles, behind))
        return ChunkBudget(tokens, min(tokens, yielding), urgent)

    def observe(self, plan: StepPlan, seconds: float) -> None:
        """A completed step occupied the device for this long."""
        if self.times is not None:
            self.times.observe(plan, seconds)
        if self._yielding is not None and self._all_yield:
            self._yielding.measure(seconds, has_chunk=bool((~plan.samples).any() or plan.counts.max() > 1))

    def observe_repeated(self, last: StepPlan, seconds: Sequence[float]) -> None:
        """`observe` for steps that decoded the same rows one after the other; `last` is the last one."""
        if self.times is not None:
            self.times.observe_repeated(last, seconds)
        if self._yielding is not None and self._all_yield:
            for one in seconds:
                self._yielding.measure(one, has_chunk=False)

    def _by_tokens(self, num_singles: int, is_many: bool) -> int:
        """The token budget does not count rows that decode: otherwise a prompt that fills it exactly would be split,
        and its last few tokens would need another step. The mixed budget counts them. It keeps steps that also decode
        short, unless many requests wait for their first token."""
        if num_singles == 0 or is_many or not self._has_mixed_budget:
            return self.token_budget
        # A quarter is reserved for chunks, so prefill advances however many rows decode.
        return max(self.mixed_budget - num_singles, self.mixed_budget // 4)

    def _in_time(self, times: StepTimeModel, chunk_s: float, rows: Rows, singles: Int64s, behind: Int64s) -> int:
        """Prompt tokens that add this time to the step."""
        tokens = times.prompt_tokens(chunk_s, int(rows.computed[behind].max()) if len(behind) else 0)
        if self._first_chunk and len(singles):
            return min(tokens, max(self._first_chunk, 2 * times.most_prompt_tokens))
        return tokens

    def chunk(self, seating: Seating, row: int, budget: int, taken: int = 0) -> int:
        """Number of the row's tokens, beyond `taken`, that budget and blocks allow. Takes the blocks.

        If the budget splits a prompt, it does so at a multiple of the token budget where possible: graphs and kernels
        exist for whole chunks. A small budget is not cut to less than half: that would only add short steps.
        """
        rows = seating.rows
        computed, known, size = int(rows.computed[row]) + taken, int(rows.known[row]), rows.block_size
        holds = int(rows.num_blocks[row]) + seating.num_available_columns
        most = seating.documents.most(row, known - computed + taken) - taken
        count = max(0, min(most, budget, holds * size - computed))
        if count == budget:
            past_multiple = (computed + count) % self.token_budget
            can_cut = past_multiple < count if 2 * count > self.token_budget else 2 * past_multiple <= count
            count -= past_multiple if can_cut and computed + count < known else 0
        if seating.checkpoints is not None:
            count = seating.checkpoints.cut(row, computed, count, known)
        if count:
            seating.grow(row, -(-(computed + count) // size) - int(rows.num_blocks[row]))
        return count
