"""How many tokens a step may compute, and how they are cut into chunks."""

from __future__ import annotations

from millrace.plan.seating import Seating

MANY_PREFILLS, MANY_PREFILLS_SHARE = 8, 1 / 8
"""With at least this many requests waiting for their first token, and more than this many per decoding row, steps use
the full token budget: short steps would delay more requests than they keep smooth."""


class StepBudget:
    def __init__(self, token_budget: int, mixed_budget: int) -> None:
        self.token_budget = token_budget
        self.mixed_budget = min(mixed_budget or token_budget, token_budget)
        self._has_mixed_budget = self.mixed_budget < token_budget

    def for_chunks(self, num_singles: int, num_without_token: int) -> int:
        """Tokens for chunks, in a step that also gives one token to each of `num_singles` rows. `num_without_token`:
        requests that wait for their first token.

        The token budget does not count those rows: otherwise a prompt that fills it exactly would be split, and its
        last few tokens would need another step. The mixed budget counts them. It keeps steps that also decode short,
        unless many requests wait for their first token.
        """
        is_many = num_without_token >= MANY_PREFILLS and num_without_token > MANY_PREFILLS_SHARE * num_singles
        if num_singles == 0 or is_many or not self._has_mixed_budget:
            return self.token_budget
        # A quarter is reserved for chunks, so prefill advances however many rows decode.
        return max(self.mixed_budget - num_singles, self.mixed_budget // 4)

    def chunk(self, seating: Seating, row: int, budget: int) -> int:
        """Number of the row's tokens that budget and blocks allow. Takes the blocks.

        If the budget splits a prompt, it does so at a multiple of the token budget where possible: graphs and kernels
        exist for whole chunks.
        """
        rows = seating.rows
        computed, known, size = int(rows.computed[row]), int(rows.known[row]), rows.block_size
        holds = int(rows.num_blocks[row]) + seating.num_available_columns
        count = max(0, min(known - computed, budget, holds * size - computed))
        if count == budget:
            past_multiple = (computed + count) % self.token_budget
            count -= past_multiple if past_multiple < count and computed + count < known else 0
        if count:
            seating.grow(row, -(-(computed + count) // size) - int(rows.num_blocks[row]))
        return count
