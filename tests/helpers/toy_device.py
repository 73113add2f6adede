"""A device that checks instead of computing: each KV slot holds a digest of all tokens up to it.

A step verifies for every token that the row's block tables lead to exactly the prefix that the request would have
written if it ran alone, as far as each group's window reaches. This detects wrong blocks, blocks freed too early, false
prefix hits and lost updates. Copies to host memory and back take effect when they end, and spoil what they write until
then; so a block or slot that is read or reused too early is detected too. Rows with places for drafts accept some of
them: the device knows how far they are, and the host learns it a step later.
"""

from __future__ import annotations

import random
from collections.abc import Container

import numpy as np

from millrace.plan.step import BlockCopies, Location, StepPlan


def digest(parent: int, token: int) -> int:
    return hash((parent, token))


def next_token(state: int, vocab: int) -> int:
    """The toy model: the next token is a function of the whole prefix."""
    return (state >> 7) % vocab


def allowed_tokens(state: int, vocab: int) -> list[int]:
    """The toy grammar: a function of the whole prefix, too. After a third of them one token is forced."""
    if (state >> 5) % 3 == 0:
        return [(state >> 13) % vocab]
    return [token for token in range(vocab) if (state >> token) % 2] or [0]


def draw_token(state: int, vocab: int, allowed: list[int] | None) -> int:
    """The next token, or the first allowed one after it."""
    token = next_token(state, vocab)
    return token if allowed is None else min(allowed, key=lambda other: (other - token) % vocab)


def lone_run(
    prompt: list[int],
    max_tokens: int,
    end_tokens: tuple[int, ...],
    min_tokens: int,
    vocab: int,
    constrained: bool = False,
):
    """What a request must generate in any batch: (tokens without the end token, reason)."""
    state = 0
    for token in prompt:
        state = digest(state, token)
    out: list[int] = []
    while True:
        token = draw_token(state, vocab, allowed_tokens(state, vocab) if constrained else None)
        if token in end_tokens and len(out) >= min_tokens:
            return out, "stop"
        out.append(token)
        if len(out) == max_tokens:
            return out, "length"
        state = digest(state, token)


class ToyDevice:
    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        max_rows: int,
        vocab: int,
        windows: tuple[int | None, ...] = (None,),
        seed: int = 0,
        has_states: bool = False,
    ) -> None:
        self.states: dict[int, tuple[int, int]] | None = {} if has_states else None
        """By row: tokens in its recurrent state, and their digest."""
        self.kept: dict[int, tuple[int, int]] = {}
        """The states in slots."""
        self.block_size = block_size
        self.vocab = vocab
        self.windows = windows
        self.slots: list[tuple[int, int] | None] = [None] * ((num_blocks + 1) * block_size)
        """Group and digest: a block belongs to one group at a time."""
        self.tables: list[dict[tuple[int, int], int]] = [{} for _ in range(max_rows)]
        self.tokens: list[list[int]] = [[] for _ in range(max_rows)]
        self.limits = [0] * max_rows
        self.updated = -1
        """The last step whose updates were applied."""
        self.fail_on: set[int] = set()
        self.request_of: dict[int, int] = {}
        self.ended: Container[int] = ()
        """Requests that the host has ended. Steps in flight may still have their rows."""
        self.rng = random.Random(seed)
        self.num_accepted = self.num_masked_accepted = self.num_forced = 0
        self.beside: dict[Location, dict[int, list[tuple[int, int] | None]]] = {"host": {}, "disk": {}}
        """Content of each slot of host memory and of the disk."""

    def begin_copies(self, copies: BlockCopies) -> None:
        for slot in copies.slots.tolist():
            self._write(copies.target, slot, [None] * self.block_size)

    def end_copies(self, copies: BlockCopies, failed: bool) -> None:
        for block, slot in zip(copies.blocks.tolist(), copies.slots.tolist(), strict=True):
            if not failed:
                self._write(copies.target, slot, self._read_at(copies.source, block))

    def read_blocks(self, blocks: list[int]) -> list[list[tuple[int, int] | None]]:
        return [self._read_at("device", block) for block in blocks]

    def write_block(self, block: int, content: list[tuple[int, int] | None]) -> None:
        self._write("device", block, content)

    def _read_at(self, location: Location, at: int) -> list[tuple[int, int] | None]:
        if location == "device":
            return self.slots[at * self.block_size : (at + 1) * self.block_size]
        return list(self.beside[location][at])

    def _write(self, location: Location, at: int, content: list[tuple[int, int] | None]) -> None:
        if location == "device":
            self.slots[at * self.block_size : (at + 1) * self.block_size] = content
        else:
            self.beside[location][at] = content

    def propose(self, plan: StepPlan) -> dict[int, list[int]]:
        """Drafts of the masked rows, by index in the plan: often right, sometimes refused by the grammar."""
        self._update(plan)
        drafts: dict[int, list[int]] = {}
        for index in np.flatnonzero(plan.masked & (plan.draft_places > 0)).tolist():
            tokens, limit = self.tokens[int(plan.rows[index])], self.limits[int(plan.rows[index])]
            state, own = 0, []
            for token in tokens:
                state = digest(state, token)
            forced = [one.tokens.tolist() for one in plan.forced if one.row == int(plan.rows[index])]
            if forced:
                drafts[index] = forced[0][: max(0, min(int(plan.draft_places[index]), limit - len(tokens) - 1))]
                self.num_forced += len(drafts[index])
                continue
            for _ in range(min(self.rng.randrange(int(plan.draft_places[index]) + 1), limit - len(tokens) - 1)):
                right = draw_token(state, self.vocab, allowed_tokens(state, self.vocab))
                own.append(right if self.rng.random() < 0.7 else self.rng.randrange(self.vocab))
                state = digest(state, own[-1])
            drafts[index] = own
        return drafts

    def _update(self, plan: StepPlan) -> None:
        if plan.step_no == self.updated:
            return
        self.updated = plan.step_no
        for admission in plan.admitted:
            self.tables[admission.row] = {}
            self.tokens[admission.row] = admission.tokens.tolist()
            self.limits[admission.row] = admission.limit
            self.request_of[admission.row] = admission.request_id
        for appended in plan.appended:
            tokens = self.tokens[appended.row]
            assert tokens[appended.start :] == [appended.tokens[0]], "the step before drew another token"
            tokens += appended.tokens[1:].tolist()
        groups = plan.block_groups if plan.block_groups is not None else np.zeros_like(plan.block_ids)
        for group, row, col, block in zip(groups, plan.block_rows, plan.block_cols, plan.block_ids, strict=True):
            assert 0 < block
            self.tables[int(row)][int(group), int(col)] = int(block)

    def run(
        self,
        plan: StepPlan,
        masks: dict[int, list[list[int]]] | None = None,
        drafts: dict[int, list[int]] | None = None,
    ) -> tuple[np.ndarray, np.ndarray | None]:
        """The tokens of the drawing rows and, with draft places, how many each row drew. `masks`: the tokens that some
        of the plan's rows may draw at each of their places, by index in the plan, and `drafts` those before the later
        places. Other rows have drafts that this device makes up."""
        self._update(plan)
        if any(self.request_of[row] in self.fail_on for row in plan.rows.tolist()):
            raise RuntimeError("poison")
        self._copy_states(plan, loads=True)
        assert len(set(plan.rows.tolist())) == len(plan.rows), "a row twice in one step"
        drawn: list[int] = []
        counts = []
        for index, row in enumerate(plan.rows.tolist()):
            start, count = int(plan.starts[index]), int(plan.counts[index])
            places = 0 if plan.draft_places is None else int(plan.draft_places[index])
            if plan.draft_places is None:
                assert not plan.samples[index] or start + count == len(self.tokens[row])
            elif plan.samples[index] and count == 1:
                assert start <= len(self.tokens[row]) - 1
                start = len(self.tokens[row]) - 1
                if len(self.tokens[row]) >= self.limits[row]:
                    counts.append(0)  # past its limit: an earlier step accepted more than the least
                    continue
            state = self._compute(row, start, count)
            if plan.samples[index]:
                if masks is not None and index in masks:
                    own = self._verify(row, state, masks[index], (drafts or {}).get(index, []))
                else:
                    own = self._draw(row, state, places)
                drawn += own
                counts.append(len(own))
        self._copy_states(plan, loads=False)
        return np.asarray(drawn, np.int32), None if plan.draft_places is None else np.asarray(counts, np.int32)

    def _copy_states(self, plan: StepPlan, loads: bool) -> None:
        if plan.states is None or self.states is None:
            return
        copies, num_loads = plan.states, plan.states.num_loads
        columns = zip(copies.rows.tolist(), copies.slots.tolist(), copies.positions.tolist(), strict=True)
        for row, slot, position in list(columns)[:num_loads] if loads else list(columns)[num_loads:]:
            source = self.kept[slot] if loads else self.states[row]
            assert source[0] == position, "the state is of another prefix"
            if loads:
                self.states[row] = source
            else:
                self.kept[slot] = source

    def _verify(self, row: int, state: int, masks: list[list[int]], drafts: list[int]) -> list[int]:
        """A token from each mask, up to the first that is not the draft at its place."""
        assert len(masks) == len(drafts) + 1
        own: list[int] = []
        for place, allowed in enumerate(masks):
            # The draw of an ended request is discarded, and its last token may be missing in the mask.
            is_ended = self.request_of[row] in self.ended
            assert is_ended or allowed == allowed_tokens(state, self.vocab), "the mask is of another prefix"
            own.append(draw_token(state, self.vocab, allowed))
            self.tokens[row].append(own[-1])
            if place == len(drafts) or own[-1] != drafts[place]:
                break
            self.num_masked_accepted += 1
            state = self._compute(row, len(self.tokens[row]) - 1, 1)
        if len(own) <= len(drafts) and len(self.tokens[row]) < self.limits[row]:
            self._spoil(row, len(self.tokens[row]) - 1)
        return own

    def _draw(self, row: int, state: int, places: int) -> list[int]:
        """One token, and one more for each draft that is right, up to the limit."""
        own: list[int] = []
        for place in range(places + 1):
            token = draw_token(state, self.vocab, None)
            own.append(token)
            self.tokens[row].append(token)
            is_right = self.rng.random() < 0.7
            if place == places or not is_right or len(self.tokens[row]) >= self.limits[row]:
                break
            self.num_accepted += 1
            state = self._compute(row, len(self.tokens[row]) - 1, 1)
        else:
            raise AssertionError("the loop ends with a break")
        if len(own) <= places and len(self.tokens[row]) < self.limits[row]:
            self._spoil(row, len(self.tokens[row]) - 1)
        return own

    def _compute(self, row: int, start: int, count: int) -> int:
        state = self._read(row, start - 1) if start else 0
        if self.states is not None:
            assert not start or self.states[row] == (start, state), f"row {row} has no state at {start}"
        for position in range(start, start + count):
            state = digest(state, self.tokens[row][position])
            for group in range(len(self.windows)):
                self.slots[self._slot(group, row, position)] = (group, state)
        self._check_prefix(row, start, start + count)
        if self.states is not None:
            self.states[row] = (start + count, state)
        return state

    def _spoil(self, row: int, position: int) -> None:
        """A wrong draft was computed here: the keys and values are of another token."""
        for group in range(len(self.windows)):
            self.slots[self._slot(group, row, position)] = (group, -1)

    def _slot(self, group: int, row: int, position: int) -> int:
        table = self.tables[row]
        return table[group, position // self.block_size] * self.block_size + position % self.block_size

    def _read(self, row: int, position: int) -> int:
        found = self.slots[self._slot(0, row, position)]
        assert found is not None
        return found[1]

    def _check_prefix(self, row: int, start: int, length: int) -> None:
        """Every key that the tokens from `start` on can see is the one that a lone run would have written."""
        state = 0
        for position in range(length):
            state = digest(state, self.tokens[row][position])
            for group, window in enumerate(self.windows):
                if window is None or start - position < window:
                    found = self.slots[self._slot(group, row, position)]
                    assert found == (group, state), f"row {row} reads the wrong KV at {position}, group {group}"
